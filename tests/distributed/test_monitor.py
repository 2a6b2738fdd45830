"""The requests of many ranks' monitors to their store, and their conclusions. The store is a dictionary here."""

import socket
import time
from collections import Counter
from contextlib import ExitStack
from threading import Event, Lock

import pytest

from nestpipe.distributed.activity import Activity
from nestpipe.distributed.monitor import Monitor, StoreLostError

NUM_RANKS = 64


class CountingStore:
    """Counts requests by rank. Delays them while `answers` is cleared, or while the rank is in `lost`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_requests: Counter[int] = Counter()
        self.answers = Event()
        self.answers.set()
        self.lost: set[int] = set()
        self._lock = Lock()

    def for_rank(self, rank: int) -> "RankStore":
        return RankStore(self, rank)


class RankStore:
    def __init__(self, store: CountingStore, rank: int) -> None:
        self.store = store
        self.rank = rank

    def _count(self) -> dict[str, bytes]:
        with self.store._lock:
            self.store.num_requests[self.rank] += 1
        self.store.answers.wait()
        while self.rank in self.store.lost:
            time.sleep(0.01)
        return self.store.values

    def set(self, key: str, value: str) -> None:
        self._count()[key] = value.encode()

    def append(self, key: str, value: str) -> None:
        values = self._count()
        with self.store._lock:
            values[key] = values.get(key, b"") + value.encode()

    def add(self, key: str, amount: int) -> int:
        values = self._count()
        with self.store._lock:
            values[key] = str(int(values.get(key, b"0")) + amount).encode()
            return int(values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self._count() for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._count()
        return [values[key] for key in keys]


def start(
    store: CountingStore,
    num_ranks: int,
    timeout_seconds: float,
    stall_seconds: float = 600.0,
    activities: list[Activity] | None = None,
) -> list[Monitor]:
    activities = activities or [Activity() for _ in range(num_ranks)]
    monitors = [
        Monitor(rank, num_ranks, store.for_rank(rank), activity, timeout_seconds, stall_seconds)
        for rank, activity in enumerate(activities)
    ]
    until(lambda: all(monitor.is_complete for monitor in monitors))
    return monitors


def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop(monitors: list[Monitor]) -> None:
    for monitor in monitors:
        monitor.stop(0.0)
    assert all(monitor.stop(5.0) for monitor in monitors)


def test_one_request_a_second_and_rank() -> None:
    """Fails if Monitor._tick also reads when it writes."""
    store = CountingStore()
    monitors = start(store, NUM_RANKS, timeout_seconds=2.5)  # shorter than the default, for more ticks in less time
    store.num_requests.clear()
    started = time.monotonic()
    time.sleep(1.5)
    passed = time.monotonic() - started
    assert max(store.num_requests.values()) <= passed / monitors[0].tick_seconds + 1
    assert not any(monitor.failures for monitor in monitors)
    monitors[5].publish({5: "KeyError: 'no such layer'"}, 5.0)
    until(lambda: all(monitor.failures == {5: "KeyError: 'no such layer'"} for monitor in monitors), 5.0)
    monitors[0].timeout_seconds = 25.0
    assert monitors[0].tick_seconds == 1.0
    stop(monitors)


def test_a_slow_rank_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Every rank that waits names it, with no more requests than before. Fails if Monitor._tick reads the heartbeats of
    all ranks in a request of its own, or if Monitor._warn prints at every look."""
    store, activities = CountingStore(), [Activity() for _ in range(12)]
    activities[4].where = "step 7"
    with ExitStack() as waits:
        for rank, activity in enumerate(activities):
            if rank != 4:
                waits.enter_context(activity.doing("dense reduction", is_remote=True, is_caller=True))
        monitors = start(store, 12, timeout_seconds=2.5, stall_seconds=2.5, activities=activities)
        store.num_requests.clear()
        started = time.monotonic()
        time.sleep(1.0)  # four times as long as a wait that is worth a line
        assert max(store.num_requests.values()) <= (time.monotonic() - started) / monitors[0].tick_seconds + 1
        stop(monitors)
    lines = capfd.readouterr().err.splitlines()
    slow = f"rank 4 is slow (step 7, in the caller's own code, on host {socket.gethostname()}, since 2"
    assert [line for line in lines if slow not in line] == []
    assert sorted(int(line.split()[2].rstrip(":")) for line in lines) == [rank for rank in range(12) if rank != 4]


def test_a_whole_host_that_goes_silent() -> None:
    """Ranks that watch each other are lost together. Fails if Monitor._check_silence publishes only the next rank."""
    store = CountingStore()
    monitors = start(store, 6, timeout_seconds=2.0)
    store.lost = {2, 3, 4}
    others = [monitors[rank] for rank in (0, 1, 5)]
    until(lambda: all(set(monitor.failures) == {2, 3, 4} for monitor in others), 8.0)
    assert all("no sign of life for 2 s" in text for text in monitors[0].failures.values())
    store.lost = set()
    stop(monitors)


def test_a_store_that_does_not_answer_for_a_while() -> None:
    """A request fails in time, and no rank is given up, since none could write either. Fails if Monitor.ask has no
    limit."""
    store = CountingStore()
    monitors = start(store, 3, timeout_seconds=1.0)
    store.answers.clear()
    with pytest.raises(StoreLostError, match=r"has not answered for 0\.5 s"):
        monitors[0].beats(limit_seconds=0.5)
    time.sleep(1.0)
    store.answers.set()
    time.sleep(0.5)
    assert not any(monitor.failures for monitor in monitors)
    stop(monitors)


@pytest.mark.parametrize("what", ["a rank", "the store"])
def test_someone_is_told_when_threads_do_not_ask(what: str) -> None:
    """A thread that waits for the device reads no failures. Fails if _count_lost calls nothing, and, for the store, if
    the thread ends at once."""
    store, calls = CountingStore(), Counter[int]()
    with ExitStack() as stack:
        monitors = start(store, 3, timeout_seconds=1.0)
        for monitor in monitors:
            stack.callback(monitor.stop, 1.0)
            monitor.when_lost.append(lambda rank=monitor.rank: calls.update([rank]))
        time.sleep(10 * monitors[0].tick_seconds)
        assert not calls
        if what == "a rank":
            monitors[2].publish({2: "no more space"}, 1.0)
        else:
            store.values.clear()  # every request raises an error
        until(lambda: set(calls) == {0, 1, 2})
        time.sleep(10 * monitors[0].tick_seconds)
        assert set(calls.values()) == {1}
