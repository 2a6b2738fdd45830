"""How the launcher waits for its ranks."""

import subprocess
import time

from nestpipe.cli.launch import _wait


def test_a_failure_behind_a_rank_that_goes_on() -> None:
    """On 0.1 only the first rank that goes on is looked at. Fails if _wait stops polling at it."""
    ranks = [subprocess.Popen(["sleep", "30"]), subprocess.Popen(["false"])]
    started = time.monotonic()
    try:
        _wait(ranks)
        assert [rank.returncode for rank in ranks] == [None, 1]
        _wait(ranks, time.monotonic() + 0.1)
        assert time.monotonic() - started < 10
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
