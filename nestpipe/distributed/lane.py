"""A lane: a thread that runs the work it is handed, in order."""

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
    """Thread of a lane. It may block, because its caller waits for it with a watch."""

    is_busy = False


def wait_for_lanes(limit_seconds: float) -> bool:
    """Waits until no lane is busy. Returns False if one still is after the limit.

    Called at the end of the process: a thread that returns to Python from a collective while the interpreter shuts down
    aborts the process.
    """
    deadline = time.monotonic() + limit_seconds
    while any(thread.is_busy for thread in enumerate_threads() if isinstance(thread, LaneThread)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Lane:
    """Runs work in the order of submission, concurrently with other lanes.

    The thread starts with the first piece of work. It is a daemon: one stuck in a collective does not keep the process
    alive.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: LaneThread | None = None

    @property
    def is_current(self) -> bool:
        """Returns whether the calling thread is this lane's."""
        return current_thread() is self._thread

    def submit(self, work: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            self._thread = LaneThread(target=self._run, name=f"nestpipe-{self.name}", daemon=True)
            self._thread.start()
        pending: Future[T] = Future()
        self._work.put((pending, work))
        return pending

    def close(self, timeout_seconds: float | None = None) -> None:
        """Ends the thread. Waits until all submitted work is done, or until the timeout."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout_seconds)
            self._thread = None

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # a per-thread setting; nothing that a lane computes is differentiated
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
