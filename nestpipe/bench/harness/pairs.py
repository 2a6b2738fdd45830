"""Compares works on a noisy machine: interleaved, in alternating order, by the median of the ratios of pairs."""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")

PAUSE_SECONDS = 0.01
"""Pause before each measurement. torch's worker threads keep spinning for milliseconds after a parallel operation and
would take the cores from whatever is measured next."""


@dataclass(frozen=True)
class Comparison:
    """Seconds of both works, pair by pair."""

    ours: list[float]
    baseline: list[float]

    @property
    def ratios(self) -> list[float]:
        return [b / o for o, b in zip(self.ours, self.baseline, strict=True)]

    def fields(self, name: str) -> dict[str, float]:
        """Returns baseline / ours (higher is better) as fields of a record: the median of the pairs, and the range."""
        return spread(name, self.ratios)


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Returns fields of a record: the median of the values, and their range."""
    return {name: statistics.median(values), f"{name}_low": min(values), f"{name}_high": max(values)}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns two of the values, between which the true median lies with a probability of at least 95%."""
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
    """Times both in turns. `prepare` runs before each pair, untimed. A first pair is not counted."""
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
    """Returns the seconds of each work, by round. Each round begins with another work. A first round is not counted."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(num_rounds + 1):
        for turn in range(len(works)):
            which = (number + turn) % len(works)
            seconds = _timed(works[which])
            if number > 0:
                times[which].append(seconds)
    return times


def alternate(
    works: Mapping[Name, Callable[[], Result]], num_rounds: int, warm_up_rounds: int = 1
) -> dict[Name, list[Result]]:
    """Runs all works in every round, in reverse order every other round. Returns the results of each, by round."""
    results: dict[Name, list[Result]] = {name: [] for name in works}
    for number in range(num_rounds + warm_up_rounds):
        for name in list(works)[:: 1 if number % 2 else -1]:
            result = works[name]()
            if number >= warm_up_rounds:
                results[name].append(result)
    return results


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch use one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _timed(work: Callable[[], object]) -> float:
    time.sleep(PAUSE_SECONDS)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
