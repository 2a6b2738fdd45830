"""Waiting for other ranks: never for ever, and with the reason when it ends badly.

The ranks' TCP store carries what cannot travel by a collective that no longer works: the text of a rank's failure, who
is still there, and heartbeats of ranks that are at long work.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Event, Thread
from typing import Protocol, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

POLL_SECONDS = 0.25
"""how soon a rank that waits hears that another one has failed"""
ROLL_CALL_SECONDS = 1.5
"""how long ranks have to say that they are still there"""


class RankError(RuntimeError):
    """Another rank failed, died or hangs; the text says which, where, and why if it could tell."""


class LostConnectionError(ConnectionError):
    """A collective failed: a rank that takes part in it is gone."""


class TextStore(Protocol):
    """What is used of torch's TCP store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Watch:
    def __init__(self, rank: int, size: int, store: TextStore | None, timeout_seconds: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.where = "at the start"
        """the step this rank is at, for messages"""
        self.failure: BaseException | None = None
        """why this world can no longer be used"""
        self._store = store
        self._num_beats = 0

    def wait(self, pending: Future[T], stage: str, is_remote: bool = True) -> T:
        """The result of a lane's work. The caller's thread stays open to Ctrl-C.

        Work that is not remote needs no other rank and may take as long as it likes; but if another rank fails
        meanwhile, this one ends too.
        """
        if self.failure is not None:
            raise RankError(f"these ranks have failed before: {self.failure}; start them again")
        started = time.monotonic()
        beats: list[str] | None = None
        while not wait([pending], POLL_SECONDS).done:
            if texts := self._failures():
                self._linger()
                raise self._lost(stage, texts)
            waited = time.monotonic() - started if is_remote else 0.0
            if beats is None and waited > self.timeout_seconds / 2:
                beats = self._beats()
            if waited > self.timeout_seconds:
                if self._beats() == beats:
                    raise self._lost(stage, self._roll_call(f"no answer for {self.timeout_seconds:g} s, it hangs"))
                started, beats = time.monotonic(), None
        if isinstance(error := pending.exception(), LostConnectionError):
            raise self.explained(error, stage)
        return pending.result()

    def explained(self, error: Exception, stage: str) -> Exception:
        """A lost connection becomes an error that says which rank, and why; others stay as they are."""
        if not isinstance(error, LostConnectionError):
            return error
        return self._lost(stage, self._failures() or self._roll_call("its connection was closed, it has died"))

    def agreed(self, error: E) -> E:
        """Marks an error that all ranks raise at the same place: they can go on together afterwards."""
        error._nestpipe_is_agreed = True  # type: ignore[attr-defined]
        return error

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Around what other ranks take part in: an error they do not know of is told to them."""
        try:
            yield
        except BaseException as error:
            self.report(error)
            raise

    def report(self, error: BaseException) -> None:
        """Tells the other ranks, wherever they wait, that this one goes no further."""
        if self.size > 1 and self.failure is None and not getattr(error, "_nestpipe_is_agreed", False):
            self.failure = error
            self._set(f"failed/{self.rank}", describe(error))
            self._set("failed", "some")
            self._linger()

    def post(self, key: str, text: str) -> None:
        self._set(key, text)

    def read(self, key: str) -> str:
        """Another rank's text, or what to say when it cannot be read."""
        return self._get(key) or "(its text could not be read)"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around long work without collectives: others, who wait for this rank, go on waiting."""
        if self.size == 1:
            yield
            return
        ended = Event()
        beating = Thread(target=self._beat_until, args=(ended,), name="nestpipe-heartbeat", daemon=True)
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()

    def _beat_until(self, ended: Event) -> None:
        while not ended.is_set():
            self._num_beats += 1
            self._set(f"beat/{self.rank}", str(self._num_beats))
            ended.wait(self.timeout_seconds / 5)

    def _beats(self) -> list[str]:
        return [self._get(f"beat/{rank}") for rank in self._others()]

    def _lost(self, stage: str, reasons: dict[int, str]) -> RankError:
        text = "; ".join(f"rank {rank} failed: {reason}" for rank, reason in sorted(reasons.items()))
        self.failure = RankError(f"{self.where}, in {stage}: {text}")
        return self.failure

    def _failures(self) -> dict[int, str]:
        if not self._get("failed"):
            return {}
        texts = {rank: self._get(f"failed/{rank}") for rank in self._others()}
        return {rank: text for rank, text in texts.items() if text}

    def _roll_call(self, reason: str) -> dict[int, str]:
        """Which ranks are not there, after each that is has said so."""
        self._set(f"here/{self.rank}", self.where)
        time.sleep(ROLL_CALL_SECONDS)
        if failures := self._failures():
            return failures
        missing = [rank for rank in self._others() if not self._get(f"here/{rank}")]
        return dict.fromkeys(missing or self._others(), reason)

    def _linger(self) -> None:
        """This process may hold the store: all must have read of a failure before it ends."""
        time.sleep(3 * POLL_SECONDS)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    # The process that holds the store may be the one that died; then nothing can be said or heard.

    def _set(self, key: str, value: str) -> None:
        try:
            if self._store is not None:
                self._store.set(key, value)
        except RuntimeError:
            self._store = None

    def _get(self, key: str) -> str:
        try:
            if self._store is not None and self._store.check([key]):
                return self._store.get(key).decode(errors="replace")
        except RuntimeError:
            self._store = None
        return ""


def describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted (Ctrl-C)"
    return f"{type(error).__name__}: {error}"
