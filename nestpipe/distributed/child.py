"""Child processes that do not outlive their parent."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the system terminate this child when its parent dies, however it dies. Call it before the program starts."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
