"""Time stamps of a channel's collectives: when this rank entered each of the last ones, and when it left it."""

from collections import deque

NUM_KEPT = 2048
"""Collectives of a channel whose stamps are kept."""


class Stamps:
    """A ring of time stamps. All ranks do a channel's collectives in the same order, so a number names the same
    collective on every rank. Collectives of device memory have no stamps: the host only enqueues them."""

    def __init__(self) -> None:
        self.count = 0
        """Collectives so far."""
        self._kept: deque[tuple[int, int]] = deque(maxlen=NUM_KEPT)

    def add(self, entered_ns: int, left_ns: int) -> None:
        """Adds a collective. Times are those of perf_counter_ns."""
        self._kept.append((entered_ns, left_ns))
        self.count += 1

    def last(self, most: int) -> tuple[int, list[tuple[int, int]]]:
        """Returns the number of the first of the last collectives, at most `most`, and their times."""
        kept = list(self._kept)
        kept = kept[len(kept) - min(most, len(kept)) :]
        return self.count - len(kept), kept
