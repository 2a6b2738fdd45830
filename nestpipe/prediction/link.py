"""The network as a fluid: collectives that run at the same time share its bandwidth equally."""

from dataclasses import dataclass

EPSILON_MS = 1e-9


@dataclass
class _Transfer:
    number: int
    starts_ms: float
    remaining_ms: float


class Link:
    """Collectives under way. A collective that is added later must not start before the last one that has ended."""

    def __init__(self) -> None:
        self._now_ms = 0.0
        self._transfers: list[_Transfer] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._transfers)

    def add(self, number: int, starts_ms: float, transfer_ms: float) -> None:
        """Adds collective `number`, which from starts_ms on would take transfer_ms alone."""
        self._transfers.append(_Transfer(number, starts_ms, transfer_ms))

    def next_end(self) -> tuple[int, float]:
        """Goes on until one of the collectives ends, and returns its number and when that is."""
        while True:
            started = [t for t in self._transfers if t.starts_ms <= self._now_ms + EPSILON_MS]
            later = [t.starts_ms for t in self._transfers if t.starts_ms > self._now_ms + EPSILON_MS]
            done = min(started, key=lambda t: (t.remaining_ms, t.number), default=None)
            if done is not None and done.remaining_ms <= EPSILON_MS:
                self._transfers.remove(done)
                return done.number, max(self._now_ms, done.starts_ms)
            moves = [] if done is None else [self._now_ms + done.remaining_ms * len(started)]
            until_ms = min([*moves, *later])
            for transfer in started:
                transfer.remaining_ms -= (until_ms - self._now_ms) / len(started)
            self._now_ms = until_ms
