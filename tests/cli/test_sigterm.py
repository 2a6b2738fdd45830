"""SIGTERM within a context, and what is left of it afterwards. test_launch.py has whole runs."""

import multiprocessing
import os
import signal
import time

import pytest

from nestpipe.cli import sigterm as sigterm_module
from nestpipe.cli.sigterm import Sigterm
from nestpipe.distributed import Notice


def test_one_line_for_several_signals(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if Sigterm._run prints for every one, or if __exit__ does not restore the handler."""
    monkeypatch.setattr(sigterm_module, "REPEAT_SECONDS", 60.0)  # the next one would end the tests
    notice, before = Notice(), (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1))
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with Sigterm(notice, "it has come") as sigterm:
            os.kill(os.getpid(), signal.SIGUSR1)  # another signal does not count
            time.sleep(0.05)
            assert not sigterm.is_received
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
            deadline = time.monotonic() + 10
            while not notice.is_stop_requested and time.monotonic() < deadline:
                time.sleep(0.01)
            assert sigterm.is_received
            assert notice.is_stop_requested
    finally:
        signal.signal(signal.SIGUSR1, before[1])
    assert capfd.readouterr().err == "it has come\n"
    assert signal.getsignal(signal.SIGTERM) == before[0]
    assert signal.set_wakeup_fd(-1) == -1


def test_a_fork_ends_as_usual() -> None:
    """A reader's worker, for example, is ended by SIGTERM. Fails without _end_as_usual: the fork ignores it, and its
    parent takes it for its own."""
    with Sigterm() as sigterm:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        time.sleep(0.1)
        worker.terminate()
        worker.join(5)
        try:
            assert worker.exitcode == -signal.SIGTERM
            assert not sigterm.is_received
        finally:
            worker.kill()
