"""A lane: a thread that does what it is handed, in order."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread, current_thread
from threading import enumerate as enumerate_threads
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class LaneThread(Thread):
    """Somebody waits for its work with a watch, so that it may block."""

    is_busy = False


def wait_for_lanes(limit_seconds: float) -> bool:
    """Waits until no lane is at work; False if one still is.

    For the end of the process: a thread that is outside Python then, in a collective for example, and comes back while
    the interpreter is ending, aborts the process.
    """
    ends = time.monotonic() + limit_seconds
    while any(thread.is_busy for thread in enumerate_threads() if isinstance(thread, LaneThread)):
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


class Lane:
    """Work of one lane runs in the order it was submitted, beside that of other lanes.

    The thread starts with the first piece. It is a daemon: stuck in a collective, it does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: LaneThread | None = None

    @property
    def is_current(self) -> bool:
        """Whether it is this lane's thread that asks."""
        return current_thread() is self._thread

    def submit(self, work: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            self._thread = LaneThread(target=self._run, name=f"nestpipe-{self.name}", daemon=True)
            self._thread.start()
        pending: Future[T] = Future()
        self._work.put((pending, work))
        return pending

    def close(self, timeout_seconds: float | None = None) -> None:
        """Waits until all that was submitted is done."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout_seconds)
            self._thread = None

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # a setting of the thread: what a lane computes is never differentiated
        thread = current_thread()
        assert isinstance(thread, LaneThread)
        while (item := self._work.get()) is not None:
            thread.is_busy = True
            pending, work = item
            try:
                pending.set_result(work())
            except BaseException as error:  # raised where the result is waited for
                pending.set_exception(error)
            del item, pending, work  # tensors they hold must not live until the next piece of work
            thread.is_busy = False
