"""Windows of row groups, read by threads before they are needed: the one in use, and one on its way."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from nestpipe.data.files.decoded_rows import Rows, join
from nestpipe.data.order import Window


class ReadAhead:
    """Row groups are decoded by threads of its own, which leave the interpreter to others while Arrow works.

    What is in memory at most: the window that samples are taken from, and the next one twice, as row groups and joined.
    """

    def __init__(self, read: Callable[[int], Rows], num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, must be at least 1")
        self._read = read
        self._pool = ThreadPoolExecutor(num_threads, "nestpipe-read")
        self._here: tuple[Window, Rows] | None = None
        self._coming: _Coming | None = None

    def take(self, window: Window) -> Rows:
        """Waits for it, if it is not here yet."""
        if self._here is not None and self._here[0] == window:
            return self._here[1]
        self._here = None
        self.expect(window)
        assert self._coming is not None
        coming, self._coming = self._coming, None
        rows = coming.joined.result()
        self._here = window, rows
        return rows

    def expect(self, window: Window) -> None:
        """Begins to read it. What was expected before and never taken is given up."""
        if self._coming is not None:
            if self._coming.window == window:
                return
            _cancel([*self._coming.groups, self._coming.joined])
        groups = [self._pool.submit(self._read, group) for group in window.groups]
        self._coming = _Coming(window, groups, self._pool.submit(_joined, groups))


@dataclass(frozen=True)
class _Coming:
    window: Window
    groups: list[Future[Rows]]
    joined: Future[Rows]


def _joined(groups: list[Future[Rows]]) -> Rows:
    """Behind the row groups in the queue: they have ended, or other threads are at them."""
    try:
        parts = [group.result() for group in groups]
    except BaseException:
        _cancel(groups)
        raise
    groups.clear()
    return join(parts)


def _cancel(futures: list[Future[Rows]]) -> None:
    """Those that no thread has begun."""
    for future in futures:
        future.cancel()
