"""Comparing ways of doing a thing on a noisy machine: in pairs, order alternated, by the median of the ratios."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
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
        return spread(name, self.ratios)


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Fields of a record: the median of the values, and their range."""
    return {name: statistics.median(values), f"{name}_low": min(values), f"{name}_high": max(values)}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which the true median lies with a probability of 95%: two of the values, by their order alone."""
    ordered, n = sorted(values), len(values)
    num_beyond = 0
    # The median is below the k-th value with the probability that fewer than k of n fall below it.
    while 40 * sum(math.comb(n, k) for k in range(num_beyond + 1)) <= 2**n:
        num_beyond += 1
    first = max(num_beyond - 1, 0)
    return ordered[first], ordered[n - 1 - first]


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


def take_turns(works: Sequence[Callable[[], object]], num_rounds: int) -> list[list[float]]:
    """Seconds of each work, round by round, each round beginning with another; a first round is left out."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(num_rounds + 1):
        for turn in range(len(works)):
            which = (number + turn) % len(works)
            seconds = _timed(works[which])
            if number > 0:
                times[which].append(seconds)
    return times


def _timed(work: Callable[[], object]) -> float:
    time.sleep(PAUSE_SECONDS)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
