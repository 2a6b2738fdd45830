"""Comparing two ways of doing a thing on a noisy machine: in pairs, order alternated, by the median of the ratios."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

PAUSE_SECONDS = 0.01
"""Before each measurement. torch's worker threads go on spinning for milliseconds after a parallel operation; without
the pause they would take the cores from whatever is measured next."""


@dataclass(frozen=True)
class Comparison:
    """Seconds of both, pair by pair."""

    ours: list[float]
    baseline: list[float]

    @property
    def ratios(self) -> list[float]:
        return [b / o for o, b in zip(self.ours, self.baseline, strict=True)]

    def fields(self, name: str) -> dict[str, float]:
        """baseline / ours (more is better): the median of the pairs, and its range."""
        ratios = self.ratios
        return {name: statistics.median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}


def compare(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    num_pairs: int,
    prepare: Callable[[], object] = lambda: None,
) -> Comparison:
    """`prepare` runs before each pair, untimed; one pair more is run first and left out."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(num_pairs + 1):
        prepare()
        order = (0, 1) if pair % 2 else (1, 0)
        for which in order:
            seconds = _timed((ours, baseline)[which])
            if pair > 0:
                times[which].append(seconds)
    return Comparison(*times)


def _timed(work: Callable[[], object]) -> float:
    time.sleep(PAUSE_SECONDS)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
