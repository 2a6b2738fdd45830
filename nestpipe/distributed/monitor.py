"""The monitor: the one thread of a rank that talks to the ranks' store. `watch.py` describes the protocol."""

import json
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, Protocol, TypeVar

from nestpipe.distributed.activity import Activity
from nestpipe.distributed.beat import Beat, beat_key, beat_keys, clock, unchanged, with_last_seen

T = TypeVar("T")

TICKS_PER_TIMEOUT = 25
"""With the default timeout a tick takes one second."""
LONGEST_TICK_SECONDS = 1.0
TICKS_PER_BEAT = 3
"""One of them writes the heartbeat, the others read."""
SHORTEST_TICK_SECONDS = 0.01
"""First tick while ranks connect; each following tick takes twice as long."""
POLL_SECONDS = 0.1
"""Interval at which a waiting thread looks at the monitor."""
STALL_PER_SLOW = 10
"""A rank is called slow after this part of stall_seconds."""
TICKS_TO_LEAVE = 5
"""Ticks after a failure in which threads of this rank may come by a wait and raise it, before `when_lost` is called."""
MOST_NAMED = 8
"""Slow ranks that a warning names."""
FAILED = "failed"
"""Key of all failures, one line each."""
HEARD = "heard"
"""Key of the ranks that have read of a failure."""
PRESENT = "present"
"""Key that counts the ranks that have started."""


class StoreLostError(RuntimeError):
    """The ranks' store is closed, or did not answer in time."""


class TextStore(Protocol):
    """The methods of torch's stores that are used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def append(self, key: str, value: str, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class Monitor:
    """Writes this rank's heartbeat, reads the next rank's and all failures, and makes the requests of other threads.

    A request to the store may block for ever, so no other thread makes one. Other threads read the attributes, or hand
    a request to `ask`, which waits with a limit.
    """

    def __init__(
        self, rank: int, size: int, store: TextStore, activity: Activity, timeout_seconds: float, stall_seconds: float
    ) -> None:
        self.rank = rank
        self.size = size
        self.stall_seconds = stall_seconds
        self.failures: dict[int, str] = {}
        """Reasons by rank; replaced, never changed in place."""
        self.is_complete = False
        """True once every rank has started."""
        self.num_answers = 0
        """Answers of the store so far."""
        self.holder_beat: Beat | None = None
        """Last heartbeat of rank 0, which holds the store unless another process does."""
        self.error: str | None = None
        """Reason for which the store is closed to this rank."""
        self.when_lost: list[Callable[[], object]] = []
        """Called, by this thread, some ticks after a rank or the store was lost."""
        self._lost_ticks = 0
        self._store = store
        self._activity = activity
        self._timeout_seconds = timeout_seconds
        self._requests: SimpleQueue[tuple[Future[Any], Callable[[TextStore], Any]] | None] = SimpleQueue()
        self._is_stopping = False
        self._num_ticks = self._num_beats = 0
        self._idle_seconds, self._num_events, self._counted_at = 0.0, -1, time.monotonic()
        self._next_look_seconds, self._has_warned = 0.0, False
        self._silent_seconds, self._next_beat, self._read_at = 0.0, b"", time.monotonic()
        self._suspects: list[bytes] | None = None
        self._thread = Thread(target=self._run, name="nestpipe-monitor", daemon=True)
        self._thread.start()

    @property
    def timeout_seconds(self) -> float:
        return self._timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        self._timeout_seconds = seconds
        self._requests.put(None)  # wakes the thread: the current tick may be a long one

    @property
    def tick_seconds(self) -> float:
        return min(LONGEST_TICK_SECONDS, self._timeout_seconds / TICKS_PER_TIMEOUT)

    @property
    def patience_seconds(self) -> float:
        """Silence after which a rank is given up, so short that all ranks read of it before the timeout."""
        return self._timeout_seconds - 2 * TICKS_PER_BEAT * self.tick_seconds

    def ask(self, request: Callable[[TextStore], T], limit_seconds: float) -> T:
        """Returns the store's answer to a request; raises StoreLostError if there is none in time."""
        pending: Future[T] = Future()
        self._requests.put((pending, request))
        deadline = time.monotonic() + limit_seconds
        while not wait([pending], POLL_SECONDS).done:
            if not self._thread.is_alive():
                raise StoreLostError(self.error or "the monitor has ended")
            if time.monotonic() > deadline:
                raise StoreLostError(f"the ranks' store has not answered for {limit_seconds:.1f} s")
        return pending.result()

    def publish(self, reasons: dict[int, str], limit_seconds: float) -> None:
        """Tells all ranks that these have failed. Returns when the store has it."""
        self.ask(lambda store: self._publish(reasons), limit_seconds)

    def beats(self, limit_seconds: float) -> list[bytes]:
        """Returns the last heartbeat of every rank."""
        return self.ask(lambda store: store.multi_get(beat_keys(self.size)), limit_seconds)

    def missing_in(self, store: TextStore) -> list[int]:
        """Request for `ask`: returns the ranks that have not started."""
        return [rank for rank in range(self.size) if not store.check([beat_key(rank)])]

    def read_failures(self, limit_seconds: float) -> dict[int, str]:
        """Reads the failures from the store, and returns them. They may be newer than `failures`."""
        self.ask(lambda store: self._note_failures(store.multi_get([FAILED])[0]), limit_seconds)
        return self.failures

    def has_everyone_heard(self, limit_seconds: float) -> bool:
        """Returns whether all ranks, including failed ones, have read of the first failure."""
        heard = self.ask(lambda store: store.multi_get([HEARD])[0], limit_seconds).split()
        return all(str(rank).encode() in heard for rank in range(self.size))

    def stop(self, limit_seconds: float) -> bool:
        """Publishes that this rank leaves, and ends the thread. Returns False if the store blocks it past the limit."""
        self._is_stopping = True
        self._requests.put(None)
        if current_thread() is not self._thread:
            self._thread.join(limit_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._store.append(FAILED, "")  # a key must exist before it can be read
            self._store.append(HEARD, "")
            self._write_beat()
            self._store.add(PRESENT, 1)
            while not self._is_stopping:
                self._serve_until_tick()
                self._tick()
            self._write_beat(has_left=True)
        except Exception as error:  # the store is gone
            self.error = str(error).splitlines()[0] if str(error) else type(error).__name__
        finally:
            del self._store
        if self.error is not None:
            self._outlive_store(self.error)

    def _outlive_store(self, error: str) -> None:
        """Refuses requests until `when_lost` was called."""
        while not self._is_stopping and self._lost_ticks < TICKS_TO_LEAVE:
            try:
                item = self._requests.get(timeout=self.tick_seconds)
            except Empty:
                self._count_lost()
                continue
            if item is not None:
                item[0].set_exception(StoreLostError(error))

    def _serve_until_tick(self) -> None:
        shortest = SHORTEST_TICK_SECONDS * 2 ** min(self._num_ticks, 10)
        started = time.monotonic()
        while not self._is_stopping:
            tick = self.tick_seconds if self.is_complete else min(shortest, self.tick_seconds)
            remaining = started + tick - time.monotonic()
            if remaining <= 0:
                return
            try:
                item = self._requests.get(timeout=remaining)
            except Empty:
                return
            if item is not None:
                self._serve(*item)

    def _serve(self, pending: Future[Any], request: Callable[[TextStore], Any]) -> None:
        try:
            pending.set_result(request(self._store))
            self.num_answers += 1
        except BaseException as error:
            pending.set_exception(StoreLostError(str(error)))
            raise

    def _tick(self) -> None:
        self._num_ticks += 1
        self._count_idle()
        if self.failures:
            self._count_lost()
        if self._num_ticks % TICKS_PER_BEAT == 0:
            self._write_beat()
            return
        if not self.is_complete and self._num_ticks % TICKS_PER_BEAT == 1:
            self.is_complete = self._store.add(PRESENT, 0) >= self.size
        elif not self.is_complete:
            self._note_failures(self._store.multi_get([FAILED])[0])
        elif self._must_look():
            failed, *beats = self._store.multi_get([FAILED, *beat_keys(self.size)])
            self._note_failures(failed)
            if self._has_warned:
                self._check_stall([Beat.decode(beat) for beat in beats])
            else:
                self._warn([Beat.decode(beat) for beat in beats])
        else:
            failed, beat, holder = self._store.multi_get([FAILED, beat_key((self.rank + 1) % self.size), beat_key(0)])
            self.holder_beat = Beat.decode(holder)
            self._note_failures(failed)
            self._check_silence(beat)
        self.num_answers += 1

    def _write_beat(self, has_left: bool = False) -> None:
        self._num_beats += 1
        is_waiting, place = self._activity.describe()
        written = socket.gethostname(), time.time(), has_left
        beat = Beat(self._num_beats, self._idle_seconds, is_waiting, place, *written)
        self._store.set(beat_key(self.rank), beat.encode())

    def _count_idle(self) -> None:
        """Counts the time without progress. Time in which this process was stopped does not count."""
        now = time.monotonic()
        passed, self._counted_at = min(now - self._counted_at, 3 * self.tick_seconds), now
        if self._activity.num_events != self._num_events:
            self._idle_seconds, self._num_events = 0.0, self._activity.num_events
            self._next_look_seconds, self._has_warned = 0.0, False
        else:
            self._idle_seconds += passed

    def _count_lost(self) -> None:
        """Counts ticks since the world can no longer be used. A thread that waits for the device comes by no wait that
        would tell it."""
        self._lost_ticks += 1
        if self._lost_ticks == TICKS_TO_LEAVE:
            for action in self.when_lost:
                action()

    def _must_look(self) -> bool:
        """Returns whether this rank has waited so long that it must find out which rank it waits for: once for a
        warning, then to give up ranks that hang."""
        slow_seconds = self.stall_seconds / STALL_PER_SLOW
        first = self.stall_seconds if self._has_warned else slow_seconds
        if self._idle_seconds < max(first, self._next_look_seconds) or not self._activity.is_in_wait:
            return False
        self._next_look_seconds = self._idle_seconds + max(slow_seconds, TICKS_PER_BEAT * self.tick_seconds)
        return True

    def _warn(self, beats: list[Beat]) -> None:
        """Prints the ranks that this one waits for, if it does nothing but wait."""
        self._has_warned = True
        is_waiting, place = self._activity.describe()
        slow = [rank for rank, beat in enumerate(beats) if not (beat.is_waiting or beat.has_left or rank == self.rank)]
        if slow and is_waiting:
            texts = [f"rank {rank} is slow {beats[rank].idle}" for rank in slow[:MOST_NAMED]]
            texts += [f"{len(slow) - MOST_NAMED} other ranks, too"] if len(slow) > MOST_NAMED else []
            since = clock(time.time() - self._idle_seconds)
            line = f"nestpipe: rank {self.rank}: {place} since {since}: {'; '.join(texts)}\n"
            print(line, end="", file=sys.stderr, flush=True)  # one write: other threads print, too

    def _check_stall(self, beats: list[Beat]) -> None:
        """Publishes the ranks that hang."""
        stalled = {
            rank: f"no progress for {beat.idle_seconds:.0f} s, it hangs {beat.idle}"
            for rank, beat in enumerate(beats)
            if beat.idle_seconds >= self.stall_seconds and not beat.has_left
        }
        working = {rank: text for rank, text in stalled.items() if not beats[rank].is_waiting}
        if working:
            self._publish(working)
        elif len(stalled) == self.size:  # all wait for each other: their calls do not match
            self._publish(stalled)

    def _check_silence(self, beat: bytes) -> None:
        """Publishes the next rank if its heartbeat has stopped. Only time in which the store answered counts."""
        now = time.monotonic()
        passed, self._read_at = min(now - self._read_at, 3 * self.tick_seconds), now
        if beat != self._next_beat or Beat.decode(beat).has_left:
            self._next_beat, self._silent_seconds, self._suspects = beat, 0.0, None
            return
        self._silent_seconds += passed
        # If a whole host is lost, its ranks watched each other. So compare all heartbeats before giving one up.
        if self._suspects is None and self._silent_seconds > self.patience_seconds / 2:
            self._suspects = self._store.multi_get(beat_keys(self.size))
        elif self._suspects is not None and self._silent_seconds > self.patience_seconds:
            text = f"no sign of life for {self._silent_seconds:.0f} s: it is stopped, or cut off from the network"
            beats = self._store.multi_get(beat_keys(self.size))
            self._publish(with_last_seen(beats, unchanged(self._suspects, beats), text))

    def _publish(self, reasons: dict[int, str]) -> None:
        new = {rank: text for rank, text in reasons.items() if rank not in self.failures}
        self._store.append(FAILED, lines_of(new))
        self._note_failures(self._store.multi_get([FAILED])[0])  # reading back shows that the append has arrived

    def _note_failures(self, failed: bytes) -> None:
        """Takes over failures read from the store, and acknowledges the first."""
        failures: dict[int, str] = {}
        for line in failed.decode(errors="replace").splitlines():
            rank, text = json.loads(line)
            failures.setdefault(rank, text)
        if failures and not self.failures:
            self._store.append(HEARD, f"{self.rank} ")
        if failures != self.failures:
            self.failures = failures


def lines_of(failures: dict[int, str]) -> str:
    """Encodes failures as the lines that are appended under FAILED."""
    return "".join(json.dumps([rank, text]) + "\n" for rank, text in failures.items())
