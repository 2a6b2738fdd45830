"""The launcher waits for all of its ranks, passes a SIGTERM on to them, and takes them with it when it dies.

Fails, for example, if _PassesOn does not send the signal, if Pipeline.__iter__ does not end at a batch with a stop
request, or if die_with_parent sends SIGTERM, which only asks a rank to stop.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nestpipe.cli.launch import _wait
from nestpipe.cli.sigterm import REPEAT_SECONDS
from tests.cli import forked_ranks
from tests.cli.forked_ranks import Run

pytestmark = pytest.mark.alone


def line(rank: int) -> str:
    return f"nestpipe: rank {rank}: SIGTERM received; stopping at the next step\n"


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """A run of the kind that the test names with `indirect`."""
    started = forked_ranks.start(tmp_path, getattr(request, "param", "trains"))
    yield started
    started.end()


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


@pytest.mark.parametrize("sent_to", ["the launcher", "rank 0", "rank 1", "all"])
def test_sigterm_stops_all_ranks(run: Run, sent_to: str) -> None:
    """They stop at the same step, and exit with 0. A job scheduler may send the signal to every process; a rank then
    gets it twice, since the launcher passes it on. Fails if REPEAT_SECONDS is 0."""
    run.wait_until("training")
    if sent_to in ("the launcher", "all"):
        assert run.launcher.pid is not None
        os.kill(run.launcher.pid, signal.SIGTERM)
    asked = [rank for rank in range(2) if sent_to in (f"rank {rank}", "all")]
    for rank in asked:
        os.kill(run.ranks[rank], signal.SIGTERM)
    assert run.exit_code() == 0, run.errors()
    assert len(set(run.num_steps())) == 1
    received = asked or [0, 1]
    assert run.errors() == [line(rank) if rank in received else "" for rank in range(2)]


def test_ctrl_c_ends_all_ranks(run: Run) -> None:
    """Fails if launch does not pass SIGINT on to its ranks, which are in sessions of their own."""
    run.wait_until("training")
    assert run.launcher.pid is not None
    os.kill(run.launcher.pid, signal.SIGINT)
    assert run.exit_code() == 128 + signal.SIGINT, run.errors()
    assert all("interrupted (Ctrl-C)" in text for text in run.errors())
    assert run.are_gone()


@pytest.mark.parametrize("run", ["starts late"], indirect=True)
def test_sigterm_before_the_ranks_have_started(run: Run) -> None:
    """Fails if _PassesOn does not wait for all ranks: a signal without a handler ends a rank."""
    run.wait_until("starting")
    assert run.launcher.pid is not None
    os.kill(run.launcher.pid, signal.SIGTERM)
    assert run.exit_code() == 0, run.errors()
    assert run.errors() == [line(0), line(1)]


@pytest.mark.parametrize("run", ["asks before its world exists"], indirect=True)
def test_sigterm_before_the_world_exists(run: Run) -> None:
    """Fails if _on_this_rank does not give the world its notice."""
    assert run.exit_code() == 0, run.errors()
    assert run.errors() == ["", line(1)]
    assert run.num_steps() == ["0", "0"]


@pytest.mark.parametrize("run", ["evaluates"], indirect=True)
def test_sigterm_to_ranks_that_do_not_train(run: Run) -> None:
    """It ends them at once: nothing would look at a request to stop. Fails if on_this_rank always handles SIGTERM."""
    run.wait_until("training")
    assert run.launcher.pid is not None
    os.kill(run.launcher.pid, signal.SIGTERM)
    assert run.exit_code() == 128 + signal.SIGTERM
    assert run.are_gone()


@pytest.mark.parametrize("run", ["hangs"], indirect=True)
@pytest.mark.parametrize("how", ["a second SIGTERM", "SIGKILL"])
def test_ranks_die_with_their_launcher(run: Run, how: str) -> None:
    """Even if they cannot stop by themselves. Fails if die_with_parent sends SIGTERM, or if the launcher ignores a
    second one."""
    run.wait_until("hanging")
    assert run.launcher.pid is not None
    if how == "a second SIGTERM":
        os.kill(run.launcher.pid, signal.SIGTERM)
        assert run.exit_code(REPEAT_SECONDS + 0.5) is None  # it waits for its ranks
        os.kill(run.launcher.pid, signal.SIGTERM)
        assert run.exit_code(2.0) == -signal.SIGTERM
        assert run.errors() == [line(0), line(1)]
    else:
        os.kill(run.launcher.pid, signal.SIGKILL)
    assert run.are_gone()


@pytest.mark.parametrize("run", ["hangs"], indirect=True)
def test_a_second_sigterm_to_a_rank(run: Run) -> None:
    """It ends that rank at once, and the other reports it. Fails if Sigterm waits for the main thread, or does not
    restore the default action."""
    run.wait_until("hanging")
    os.kill(run.ranks[1], signal.SIGTERM)
    assert run.exit_code(REPEAT_SECONDS + 0.5) is None
    assert run.errors() == ["", line(1)]
    os.kill(run.ranks[1], signal.SIGTERM)
    assert run.exit_code() == 1
    assert re.search(r"rank 1 failed: it was killed by SIGTERM \(.*, in .*, on host .*, last seen 2", run.errors()[0])
    assert run.errors()[1] == line(1)
