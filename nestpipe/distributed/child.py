"""Child processes that do not outlive their parent."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the system kill this child when its parent dies, however it dies. Call it before the program starts.

    SIGKILL, because a rank that gets SIGTERM goes on until all ranks can stop."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
