"""Turns at Python's lock.

Fails, for example, if Turns.wait waits before a loop has said when it is free, if `free` leaves the lanes free when it
ends, or if quick_switches does not restore the interval of the process.
"""

import sys
import threading
import time

import pytest

from nestpipe.pipelining import turns
from nestpipe.pipelining.turns import NoTurns, Turns, quick_switches


def waited(lane_turns: Turns) -> float:
    began = time.perf_counter()
    lane_turns.wait()
    return time.perf_counter() - began


def test_lanes_wait_until_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_SECONDS", 30.0)
    shared, done = Turns(), threading.Event()
    assert waited(shared) < 10, "nobody has said yet when it is free"
    with shared.backward():
        assert waited(shared) < 10
    lane = threading.Thread(target=lambda: (shared.wait(), done.set()))
    lane.start()
    assert not done.wait(0.2), "the launching thread needs the lock"
    with shared.free():
        assert done.wait(10)
    lane.join()


def test_a_lane_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_SECONDS", 0.05)
    shared = Turns()
    with shared.backward():
        pass
    assert 0.04 < waited(shared) < 10


def test_in_host_memory_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_SECONDS", 30.0)
    shared = NoTurns()
    with shared.backward():
        pass
    assert waited(shared) < 10


@pytest.mark.parametrize("is_on", [True, False])
def test_switches_are_quick_inside_only(is_on: bool) -> None:
    before = sys.getswitchinterval()
    with quick_switches(is_on):
        inside = sys.getswitchinterval()
        with quick_switches(True):  # of a pipeline within another
            pass
        assert sys.getswitchinterval() == inside
    assert sys.getswitchinterval() == before
    assert inside == pytest.approx(turns.SWITCH_SECONDS if is_on else before)
