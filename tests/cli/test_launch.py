"""The launcher waits for all of its ranks."""

import subprocess
import time

from nestpipe.cli.launch import _wait


def test_a_rank_fails_while_an_earlier_one_runs() -> None:
    """Fails if _wait stops polling at the first rank that still runs."""
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
