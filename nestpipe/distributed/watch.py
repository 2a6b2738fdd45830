"""Waits for other ranks: always with a limit, and with a reason if a wait fails.

The ranks share a TCP store. It carries messages that no collective can carry once a rank is lost. The process that
holds the store may itself be lost, and then a request to it blocks for ever. So one thread of each rank, the monitor,
makes all requests, and every other thread reads the monitor's attributes.

A tick is a second, or a 25th of `timeout_seconds` if that is less. In each tick the monitor makes one request:

- Every third tick it writes its heartbeat: how long the rank has made no progress, whether it waits for other ranks,
  where it is (host, step and stage), and the time. The heartbeat continues while the rank's other threads read,
  compile or save.
- In the other ticks it reads, in one request, all failures and the heartbeats of the next rank and of rank 0. So every
  rank is watched by one other, and the store gets one request per rank and tick. The heartbeat of rank 0 is kept: it
  can no longer be read if rank 0 holds the store and is lost.

Failures, and who detects them:

- A rank that raises or is interrupted adds its text to the failures, at once.
- The heartbeat of the next rank has not changed for nearly `timeout_seconds`, while the store answered: that process is
  stopped, dead, or cut off. Its watcher adds it, and all others whose heartbeat has stopped, to the failures.
- A collective reports a closed connection: the rank that gets the error compares two readings of all heartbeats, a beat
  apart. Ranks whose heartbeat did not change have died; it adds them to the failures.
- A rank that waits has made no progress for `stall_seconds`: it reads all heartbeats. Ranks that do not wait and made
  no progress for as long hang; it adds them to the failures. If all ranks wait, they wait for each other. After a tenth
  of that time it reads all heartbeats once, and prints which ranks it waits for.
- The store has not answered a waiting rank for nearly `timeout_seconds`: the process that holds it is stopped, or this
  rank is cut off. Each rank concludes this for itself. If the store was closed, only waits for other ranks fail: at the
  end of a run the process that holds it may leave first.
- Every rank that reads of a failure, even its own, raises RankError from its current or next wait. A thread that waits
  for the device instead is not in such a wait: five ticks after the failure the monitor ends the collectives of device
  memory.

Each failure says the failed rank's step, stage and host, and since when: for an error, when it was raised; for a rank
that hangs, its last progress; for one that is gone, its last heartbeat.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from nestpipe.distributed.activity import Activity
from nestpipe.distributed.beat import clock, happened_here, left, unchanged, with_last_seen
from nestpipe.distributed.monitor import (
    POLL_SECONDS,
    TICKS_PER_BEAT,
    Monitor,
    StoreLostError,
    TextStore,
)

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

START_SECONDS = 120.0
"""Time that ranks may take to find each other."""
REPORT_SECONDS = 2.0
"""Time that a failing rank tries to report its failure."""
ROLL_CALL_SECONDS = 1.5
"""Shortest time between the two readings of heartbeats that show which ranks have died."""
DIED = "its connection was closed, it has died"
CLOSED = "was closed"
STOPPED = "that process is stopped, or cut off"


class RankError(RuntimeError):
    """Another rank failed, died or hangs. The text says which, where, and why if that is known."""


class LostConnectionError(ConnectionError):
    """A collective failed: a rank that takes part in it is gone."""


class Watch:
    """The waits of a rank. In a world of one there is no monitor: a wait ends with the work, or with Ctrl-C."""

    def __init__(
        self, rank: int, size: int, store: TextStore | None, timeout_seconds: float, stall_seconds: float = 600.0
    ) -> None:
        self.rank = rank
        self.size = size
        self.failure: BaseException | None = None
        """Reason for which this world can no longer be used."""
        self.when_failed: list[Callable[[], None]] = []
        """Called once there is such a reason, after the other ranks were told."""
        self._timeout_seconds, self._stall_seconds = timeout_seconds, stall_seconds
        self._activity = Activity()
        self._monitor = (
            None if store is None else Monitor(rank, size, store, self._activity, timeout_seconds, stall_seconds)
        )
        # If rank 0 does not hold it, the process that started the ranks does: torchrun, or `nestpipe train --ranks`.
        self._rank_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def call_when_lost(self, action: Callable[[], object]) -> None:
        """Calls an action, in another thread, some seconds after a rank was lost. It must not take long."""
        if self._monitor is not None:
            self._monitor.when_lost.append(action)

    @property
    def where(self) -> str:
        """Step that this rank is at, for messages."""
        return self._activity.where

    @where.setter
    def where(self, text: str) -> None:
        self._activity.where = text

    @property
    def timeout_seconds(self) -> float:
        """Time without a sign of life after which a rank is given up."""
        return self._timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        self._timeout_seconds = seconds
        if self._monitor is not None:
            self._monitor.timeout_seconds = seconds

    @property
    def stall_seconds(self) -> float:
        """Time without progress after which a living rank is given up, if others wait for it."""
        return self._stall_seconds

    @stall_seconds.setter
    def stall_seconds(self, seconds: float) -> None:
        self._stall_seconds = seconds
        if self._monitor is not None:
            self._monitor.stall_seconds = seconds

    def wait(self, pending: Future[T], stage: str, is_remote: bool = True) -> T:
        """Waits for a lane's work, open to Ctrl-C, and returns its result.

        is_remote: the work needs other ranks. Other work may continue after the store has been closed.
        """
        self.check()
        if not pending.done():
            with self._activity.doing(stage, is_remote, is_caller=True):
                self._wait(lambda seconds: bool(wait([pending], seconds).done), stage, is_remote)
        if isinstance(error := pending.exception(), LostConnectionError):
            raise self.explained(error, stage)
        return pending.result()

    def wait_until(self, is_over: Callable[[float], bool], stage: str) -> None:
        """Waits until is_over(seconds) returns True, open to Ctrl-C. It waits for other ranks, at most so long."""
        self.check()
        try:
            with self._activity.doing(stage, True, is_caller=True):
                self._wait(is_over, stage, True)
        except LostConnectionError as error:
            raise self.explained(error, stage) from error

    def check(self) -> None:
        """Raises if these ranks have failed before: their collectives may still be under way."""
        if self.failure is not None:
            raise RankError(f"these ranks have failed before: {self.failure}; start them again")

    def _wait(self, is_over: Callable[[float], bool], stage: str, is_remote: bool) -> None:
        waited = unanswered = 0.0
        num_answers, looked = -1, time.monotonic()
        while not is_over(POLL_SECONDS):
            monitor = self._monitor
            if monitor is None:
                continue
            now = time.monotonic()
            # Time in which this process was stopped does not count.
            passed, looked = min(now - looked, 10 * POLL_SECONDS), now
            waited += passed
            unanswered = unanswered + passed if monitor.num_answers == num_answers else 0.0
            num_answers = monitor.num_answers
            if monitor.failures:
                raise self._lost(stage, monitor.failures)
            if monitor.error is not None:
                if is_remote and waited > monitor.patience_seconds:
                    raise self._lost(stage, self._holder(monitor, CLOSED, waited))
            elif unanswered > monitor.patience_seconds:
                reason = f"has not answered for {unanswered:.0f} s"
                raise self._lost(stage, self._holder(monitor, reason, unanswered))
            elif not monitor.is_complete and waited > START_SECONDS:
                raise self._lost(stage, self._missing(monitor))

    def explained(self, error: Exception, stage: str) -> Exception:
        """Turns a lost connection into an error that says which rank failed and why. Returns other errors unchanged."""
        if not isinstance(error, LostConnectionError) or self._monitor is None:
            return error
        reasons: dict[int, str] | str
        try:
            reasons = failures = self._roll_call(self._monitor, str(error))
            self._monitor.publish(failures, REPORT_SECONDS)
        except StoreLostError:
            reasons = self._monitor.failures or self._holder(self._monitor, CLOSED, 0.0)
        return self._lost(stage, reasons)

    def agreed(self, error: E) -> E:
        """Marks an error that all ranks raise at the same place, so that they can continue together. Returns it."""
        error._nestpipe_is_agreed = True  # type: ignore[attr-defined]
        return error

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Reports an error inside the context to the other ranks, unless they know of it."""
        try:
            yield
        except BaseException as error:
            self.report(error)
            raise

    def report(self, error: BaseException) -> None:
        """Tells the other ranks, wherever they wait, that this one has failed."""
        if self._monitor is not None and self.failure is None and not getattr(error, "_nestpipe_is_agreed", False):
            self.failure = error
            try:
                reason = f"{describe(error)} {happened_here(self._activity.place_of(error))}"
                self._monitor.publish({self.rank: reason}, REPORT_SECONDS)
                self._linger()
            except StoreLostError:
                pass  # the others will notice that this rank is gone
            self._end_collectives()

    def post(self, key: str, text: str) -> None:
        """Posts a text for other ranks. Returns when the store has it."""

        def put(store: TextStore) -> bool:
            store.set(key, text)
            return store.check([key])  # waits for an answer, unlike set

        if self._monitor is not None:
            self._ask(self._monitor, put, False)

    def read(self, key: str) -> str:
        """Returns another rank's text, or a substitute if it cannot be read."""
        unread = "(its text could not be read)"
        if self._monitor is None:
            return unread

        def get(store: TextStore) -> str:
            return store.multi_get([key])[0].decode(errors="replace") if store.check([key]) else unread

        return self._ask(self._monitor, get, unread)

    def busy(self) -> AbstractContextManager[None]:
        """Marks long work without collectives, so that an error can say where a rank was."""
        return self.doing("long work")

    def doing(self, place: str, is_remote: bool = False) -> AbstractContextManager[None]:
        """Marks work of one thread, so that an error can say where a rank hangs."""
        return self._activity.doing(place, is_remote)

    def stop(self, limit_seconds: float) -> bool:
        """Ends the monitor. Returns False if the store blocks it past the limit."""
        return self._monitor is None or self._monitor.stop(limit_seconds)

    def _ask(self, monitor: Monitor, request: Callable[[TextStore], T], otherwise: T) -> T:
        try:
            return monitor.ask(request, monitor.patience_seconds)
        except StoreLostError:
            return otherwise

    def _roll_call(self, monitor: Monitor, error: str) -> dict[int, str]:
        """Returns the ranks that have failed, left or died, with reasons."""
        limit = monitor.patience_seconds
        if failures := monitor.read_failures(limit):
            return failures
        if not monitor.is_complete and (missing := monitor.ask(monitor.missing_in, limit)):
            return dict.fromkeys(missing, "it has not started")
        before = monitor.beats(limit)
        deadline = time.monotonic() + max(ROLL_CALL_SECONDS, (TICKS_PER_BEAT + 2) * monitor.tick_seconds)
        while time.monotonic() < deadline and not monitor.failures:
            time.sleep(POLL_SECONDS)
        if failures := monitor.read_failures(limit):
            return failures
        after = monitor.beats(limit)
        if dead := [rank for rank in unchanged(before, after) if rank != self.rank]:
            return with_last_seen(after, dead, DIED)
        if gone := left(after):
            return with_last_seen(after, gone, "it has left: its world was closed, or its program has ended")
        lost = f"it has lost a connection, though every rank lives: {error}"
        return {self.rank: f"{lost} {happened_here(self._activity.describe()[1])}"}

    def _missing(self, monitor: Monitor) -> dict[int, str]:
        missing: list[int] = self._ask(monitor, monitor.missing_in, [])
        return dict.fromkeys(missing, f"it has not started within {START_SECONDS:.0f} s")

    def _holder(self, monitor: Monitor, reason: str, seconds: float) -> dict[int, str] | str:
        """Returns the failure of the process that holds the store. seconds: how long ago it was noticed."""
        place = f"at {os.environ.get('MASTER_ADDR')}, since {clock(time.time() - seconds)}"
        if self._rank_holds_store and self.rank != 0:
            text = DIED if reason == CLOSED else f"it holds the ranks' store, which {reason}: {STOPPED} from this rank"
            return {0: f"{text} {f'({place})' if monitor.holder_beat is None else monitor.holder_beat.seen}"}
        return f"the ranks' store, held by the process that started them, {reason}: {STOPPED} from this rank ({place})"

    def _lost(self, stage: str, reasons: dict[int, str] | str) -> RankError:
        if isinstance(reasons, dict):
            texts = [f"rank {r} failed: {reason}" for r, reason in sorted(reasons.items()) if r != self.rank]
            if self.rank in reasons:
                texts.append(f"this rank was given up: {reasons[self.rank]}")
            reasons = "; ".join(texts)
        self.failure = RankError(f"{self.where}, in {stage}: {reasons}")
        self._linger()
        self._end_collectives()
        return self.failure

    def _end_collectives(self) -> None:
        for action in self.when_failed:
            action()

    def _linger(self) -> None:
        """Waits until all ranks have read of the failure, if this process holds the store."""
        monitor = self._monitor
        if monitor is None or not self._rank_holds_store or self.rank != 0:
            return
        deadline = time.monotonic() + TICKS_PER_BEAT * monitor.tick_seconds
        try:
            while time.monotonic() < deadline and not monitor.has_everyone_heard(REPORT_SECONDS):
                time.sleep(POLL_SECONDS)
        except StoreLostError:
            return


def describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted (Ctrl-C)"
    return f"{type(error).__name__}: {error}"
