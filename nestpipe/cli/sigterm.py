"""SIGTERM: the first one asks for an orderly stop, a later one ends the process at once."""

import ctypes
import os
import select
import signal
import sys
import time
from threading import Thread
from types import TracebackType

from nestpipe.distributed import Notice

REPEAT_SECONDS = 1.0
"""SIGTERMs within this time count as one. A job scheduler and a launcher may each send it, and `timeout` sends it
twice."""
_SIGTERM, _END = bytes([signal.SIGTERM]), b"\0"


class Sigterm:
    """Catches SIGTERM within a context. Enter it in the main thread.

    A thread learns of the signal through Python's wakeup file, while the main thread may be in a call that does not
    return, such as the writing of a file. After the first SIGTERM, the thread restores the signal's default action.
    """

    def __init__(self, notice: Notice | None = None, text: str | None = None) -> None:
        """notice: where to ask all ranks to stop. text: line to print."""
        self.is_received = False
        self._notice = notice
        self._text = text

    def __enter__(self) -> "Sigterm":
        global _has_handler
        self._numbers, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._thread = Thread(target=self._run, name="nestpipe-sigterm", daemon=True)
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        _has_handler = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _has_handler
        _has_handler = False
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._wakeup, _END)
        self._thread.join()
        signal.signal(signal.SIGTERM, self._before)
        os.close(self._numbers)
        os.close(self._wakeup)

    def _run(self) -> None:
        while (number := os.read(self._numbers, 1)) != _SIGTERM:  # the file has the numbers of other signals, too
            if number == _END:
                return
        self.is_received = True
        if self._notice is not None:
            self._notice.is_stop_requested = True
        if self._text is not None:
            print(self._text, file=sys.stderr, flush=True)
        deadline = time.monotonic() + REPEAT_SECONDS
        while (seconds := deadline - time.monotonic()) > 0:
            if select.select([self._numbers], [], [], seconds)[0] and os.read(self._numbers, 1) == _END:
                return
        ctypes.CDLL(None).signal(signal.SIGTERM, None)  # Python's own call is for the main thread only


_has_handler = False


def _end_as_usual() -> None:
    """Restores the default action in a fork, where it would wake up the thread of its parent."""
    if _has_handler:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_as_usual)
