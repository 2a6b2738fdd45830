"""Turns at Python's lock: lanes let the launching thread go first.

On an accelerator the compute lane's thread launches the model's kernels, one Python call each. A lane that runs Python
at the same time takes the lock from it again and again, and the device waits for its next kernel. So a lane that is
about to run much Python waits, for a moment, until the launching thread does not need the lock: while autograd runs
the backward, or while it waits for a lane. The order of operations stays the same.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_SECONDS = 0.004
"""Longest time that a lane waits for its turn."""
SWITCH_SECONDS = 0.0005
"""Time after which a thread that needs Python's lock interrupts another. Python's own is 5 ms: half a step."""


class Turns:
    """Tells lanes when the launching thread does not need Python's lock."""

    def __init__(self) -> None:
        self._is_free = threading.Event()
        self._is_told = False
        """False in a loop that never says when its thread is free; lanes do not wait then."""

    @contextmanager
    def free(self) -> Iterator[None]:
        """The launching thread does not need the lock in this context."""
        self._is_free.set()
        try:
            yield
        finally:
            self._is_free.clear()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The launching thread runs a backward in this context."""
        self._is_told = True
        with self.free():
            yield

    def wait(self) -> None:
        """Waits for a lane's turn."""
        if self._is_told:
            self._is_free.wait(MOST_SECONDS)


class NoTurns(Turns):
    """In host memory the lanes work when they can: they need the cores more than the lock."""

    @contextmanager
    def free(self) -> Iterator[None]:
        yield

    def wait(self) -> None:
        pass


@contextmanager
def quick_switches(is_on: bool) -> Iterator[None]:
    """Lets threads interrupt each other sooner in this context, if `is_on`. The setting belongs to the process."""
    before = sys.getswitchinterval()
    if not is_on or before <= SWITCH_SECONDS:
        yield
        return
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
