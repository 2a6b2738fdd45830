"""The activity of a rank's threads and their progress, read by the rank's monitor."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

OWN_CODE = "the caller's own code"
_PLACE = "_nestpipe_place"
"""Attribute of an error: the place in which it was raised."""


class Activity:
    """The places in the code that each thread has entered and not left.

    The caller is the thread that trains; it counts even outside of all places. Every entry and every exit is progress.
    No lock is needed: a thread changes only its own list.
    """

    def __init__(self) -> None:
        self.where = "at the start"
        """Step that this rank is at, for messages."""
        self.num_events = 0
        """Entries and exits so far. Two at the same time may count as one."""
        self._caller = threading.get_ident()
        self._places: dict[int, list[tuple[str, bool, bool]]] = {}

    @contextmanager
    def doing(self, place: str, is_remote: bool = False, is_caller: bool = False) -> Iterator[None]:
        """Marks a place. is_remote: the thread waits for other ranks there. is_caller: it is the caller, in a wait."""
        thread = threading.get_ident()
        if is_caller:
            self._caller = thread
        places = self._places.setdefault(thread, [])
        places.append((place, is_remote, is_caller))
        self.num_events += 1
        try:
            yield
        except BaseException as error:
            error.__dict__.setdefault(_PLACE, place)  # the innermost place comes first
            raise
        finally:
            self.num_events += 1
            places.pop()
            if not places:
                self._places.pop(thread, None)

    @property
    def is_in_wait(self) -> bool:
        """Returns whether the caller waits, for other ranks or for a lane of its own rank."""
        places = self._places.get(self._caller)
        return any(is_caller for _, _, is_caller in (places or [])[-1:])

    def describe(self) -> tuple[bool, str]:
        """Returns whether this rank does nothing but wait for other ranks, and a text that says where it is."""
        innermost = {thread: places[-1] for thread, places in list(self._places.items()) if places}
        caller = innermost.setdefault(self._caller, (OWN_CODE, False, False))
        working = [place for place, is_remote, _ in innermost.values() if not is_remote]
        return not working, f"{self.where}, in {' and '.join(dict.fromkeys(working)) or caller[0]}"

    def place_of(self, error: BaseException) -> str:
        """Returns a text that says where an error was raised."""
        return f"{self.where}, in {getattr(error, _PLACE, OWN_CODE)}"
