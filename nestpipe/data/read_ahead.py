"""Windows of row groups, read by threads before they are needed: the one in use, and one on its way."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from nestpipe.data.order import Window
from nestpipe.data.rows import Rows, Samples, join


class ReadAhead:
    """Row groups are decoded by threads of its own, which leave the interpreter to others while Arrow works.

    What is in memory at most: the window that samples are taken from, and the next one twice, as row groups and joined.
    """

    def __init__(self, read: Callable[[int], Rows], num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, must be at least 1")
        self._read = read
        self._pool = ThreadPoolExecutor(num_threads, "nestpipe-read")
        self._here: tuple[Window, Samples] | None = None
        self._coming: tuple[Window, Future[Samples]] | None = None

    def take(self, window: Window) -> Samples:
        """Waits for it, if it is not here yet."""
        if self._here is not None and self._here[0] == window:
            return self._here[1]
        self._here = None
        self.expect(window)
        assert self._coming is not None
        future, self._coming = self._coming[1], None
        samples = future.result()
        self._here = window, samples
        return samples

    def expect(self, window: Window) -> None:
        """Begins to read it. What was expected before and never taken is given up."""
        if self._coming is not None:
            if self._coming[0] == window:
                return
            self._coming[1].cancel()
        groups = [self._pool.submit(self._read, group) for group in window.groups]
        self._coming = window, self._pool.submit(_joined, groups)


def _joined(groups: list[Future[Rows]]) -> Samples:
    """Behind the row groups in the queue: they have ended, or other threads are at them."""
    try:
        parts = [group.result() for group in groups]
    except BaseException:
        for group in groups:
            group.cancel()
        raise
    groups.clear()
    return join(parts)
