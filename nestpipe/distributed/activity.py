"""What the threads of a rank are doing, and whether they get anywhere; read by the rank's monitor."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """Each thread enters and leaves places; the one that calls `wait` is the caller, and counts even between places.

    Every entry and every exit is progress. Nothing here needs a lock: a thread changes only its own list.
    """

    def __init__(self) -> None:
        self.where = "at the start"
        """the step this rank is at, for messages"""
        self.num_done = 0
        """grows with progress; two threads may count as one"""
        self._caller = threading.get_ident()
        self._places: dict[int, list[tuple[str, bool, bool]]] = {}

    @contextmanager
    def doing(self, place: str, is_remote: bool = False, is_caller: bool = False) -> Iterator[None]:
        """is_remote: this thread waits for other ranks. is_caller: it is the thread that trains, and waits."""
        thread = threading.get_ident()
        if is_caller:
            self._caller = thread
        places = self._places.setdefault(thread, [])
        places.append((place, is_remote, is_caller))
        self.num_done += 1
        try:
            yield
        finally:
            self.num_done += 1
            places.pop()
            if not places:
                self._places.pop(thread, None)

    @property
    def is_in_wait(self) -> bool:
        """Whether the caller waits, be it for other ranks or for a lane of this one."""
        places = self._places.get(self._caller)
        return any(is_caller for _, _, is_caller in (places or [])[-1:])

    def describe(self) -> tuple[bool, str]:
        """Whether this rank only waits for others; and where it is."""
        innermost = {thread: places[-1] for thread, places in list(self._places.items()) if places}
        caller = innermost.setdefault(self._caller, ("the caller's own code", False, False))
        own = [place for place, is_remote, _ in innermost.values() if not is_remote]
        return not own, f"{self.where}, in {' and '.join(dict.fromkeys(own)) or caller[0]}"
