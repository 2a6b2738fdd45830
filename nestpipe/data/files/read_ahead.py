"""Reads windows of row groups in threads, before they are needed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from nestpipe.data.files.decoded_rows import Rows, join
from nestpipe.data.order import Window


class ReadAhead:
    """Decodes row groups in threads of its own, which release the interpreter lock while Arrow works.

    At most, memory holds the window that samples are taken from, and the next one twice: as row groups and joined.
    """

    def __init__(self, read: Callable[[int], Rows], num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, must be at least 1")
        self.num_threads = num_threads
        self._read = read
        self._pool = ThreadPoolExecutor(num_threads, "nestpipe-read")
        self._current: tuple[Window, Rows] | None = None
        self._pending: _PendingWindow | None = None

    def take(self, window: Window) -> Rows:
        """Returns a window, and waits for it if need be."""
        if self._current is not None and self._current[0] == window:
            return self._current[1]
        self._current = None
        self.expect(window)
        assert self._pending is not None
        pending, self._pending = self._pending, None
        rows = pending.joined.result()
        self._current = window, rows
        return rows

    def expect(self, window: Window) -> None:
        """Begins to read a window. Another one that was expected before and not taken is given up."""
        if self._pending is not None:
            if self._pending.window == window:
                return
            _cancel([*self._pending.groups, self._pending.joined])
        groups = [self._pool.submit(self._read, group) for group in window.groups]
        self._pending = _PendingWindow(window, groups, self._pool.submit(_joined, groups))


@dataclass(frozen=True)
class _PendingWindow:
    window: Window
    groups: list[Future[Rows]]
    joined: Future[Rows]


def _joined(groups: list[Future[Rows]]) -> Rows:
    """Joins row groups. It is queued after them, so each has ended or is being read by another thread."""
    try:
        parts = [group.result() for group in groups]
    except BaseException:
        _cancel(groups)
        raise
    groups.clear()
    return join(parts)


def _cancel(futures: list[Future[Rows]]) -> None:
    """Cancels what no thread has begun."""
    for future in futures:
        future.cancel()
