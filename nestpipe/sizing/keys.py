"""Distinct keys of a recipe's data: of a batch, of a global batch of many workers, and of the whole training.

Batches share keys, so many workers have fewer distinct keys than the sum of theirs. What is too much to count follows
from what was counted: the number of distinct keys of n samples grows as a power of n (Heaps' law).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Dataset
from nestpipe.embedding.table import Feature

MOST_BATCHES = 8
"""Batches of which a global batch is counted; a larger one follows from it."""
MOST_OCCURRENCES = 30_000_000
"""Keys that are read to count the rows of a training."""

Keys = Mapping[str, NDArray[np.int64]]
"""Distinct keys by table."""


@dataclass(frozen=True)
class KeyGrowth:
    """Distinct keys of batches."""

    by_table: Mapping[str, int]
    """Distinct keys of a batch of one worker, by table."""
    exponent: float
    """The keys of n batches are n to this power times those of one."""
    overlap: float
    """Share of a global batch's keys that the one before has, too."""

    @property
    def of_batch(self) -> int:
        return sum(self.by_table.values())

    def owned(self, num_workers: int) -> float:
        """Returns the keys of the global batch that a worker owns, relative to those of its own batch."""
        return float(num_workers ** (self.exponent - 1))


@dataclass(frozen=True)
class RowCount:
    """Rows of a table, over all workers."""

    num_rows: int
    origin: str
    """Where the number comes from."""


def key_growth(dataset: Dataset, features: Mapping[str, Feature], batch_size: int, num_workers: int) -> KeyGrowth:
    """Counts the keys of the first batches."""
    end = dataset.num_samples
    whole = MOST_BATCHES if end is None else end // batch_size
    num = max(1, min(num_workers, MOST_BATCHES, whole))
    size = batch_size * num
    if end is not None and end < size:
        batch_size = size = end
    own = distinct(dataset.samples(0, batch_size), features)
    first = distinct(dataset.samples(0, size), features)
    exponent = math.log(max(1, _total(first)) / max(1, _total(own))) / math.log(num) if num > 1 else 1.0
    overlap = 0.0
    if end is None or end >= 2 * size:
        after = distinct(dataset.samples(size, size), features)
        shared = sum(len(np.intersect1d(first[name], keys, assume_unique=True)) for name, keys in after.items())
        overlap = shared / max(1, _total(after))
    return KeyGrowth({name: len(keys) for name, keys in own.items()}, exponent, overlap)


def count_rows(
    dataset: Dataset, features: Mapping[str, Feature], chunk: int, num_samples: int
) -> Mapping[str, RowCount]:
    """Counts the distinct keys of the first samples, by table. Reads at most MOST_OCCURRENCES keys; the rest follows
    from the growth in the last half. chunk: samples that are read at once."""
    end = num_samples if dataset.num_samples is None else min(num_samples, dataset.num_samples)
    counts: list[tuple[int, dict[str, int]]] = []
    seen: dict[str, NDArray[np.int64]] = {}
    unread: dict[str, list[NDArray[np.int64]]] = {}
    position = occurrences = 0
    while position < end and occurrences < MOST_OCCURRENCES:
        size = min(chunk, end - position)
        batch = dataset.samples(position, size)
        occurrences += sum(len(jagged.values) for jagged in batch.keys.values())
        position += size
        for name, keys in distinct(batch, features).items():
            unread.setdefault(name, []).append(keys)
        if position >= end or occurrences >= MOST_OCCURRENCES or _is_power_of_two(position // chunk):
            seen = {name: np.unique(np.concatenate([*_held(seen, name), *parts])) for name, parts in unread.items()}
            unread = {name: [] for name in unread}
            counts.append((position, {name: len(keys) for name, keys in seen.items()}))
    return {name: _grown(name, counts, end) for name in seen}


def distinct(batch: Batch, features: Mapping[str, Feature]) -> dict[str, NDArray[np.int64]]:
    """Returns the distinct keys of a batch, by table."""
    by_table: dict[str, list[NDArray[np.int64]]] = {}
    for name, feature in features.items():
        by_table.setdefault(feature.table.name, []).append(batch.keys[name].values.numpy())
    return {table: np.unique(np.concatenate(parts)) for table, parts in by_table.items()}


def _grown(name: str, counts: list[tuple[int, dict[str, int]]], end: int) -> RowCount:
    """Returns the keys of `end` samples. counts: samples that were read so far, and the keys of each table."""
    position, last = counts[-1][0], counts[-1][1][name]
    if position >= end:
        return RowCount(last, f"counted in {end:,} samples of training")
    before = next((pair for pair in reversed(counts[:-1]) if 2 * pair[0] <= position), counts[0])
    growth = math.log(max(1, last) / max(1, before[1][name])) / math.log(position / before[0]) if counts[:-1] else 1.0
    origin = f"counted in {position:,} of {end:,} samples, the rest by their growth"
    return RowCount(round(last * (end / position) ** growth), origin)


def _held(seen: Mapping[str, NDArray[np.int64]], name: str) -> list[NDArray[np.int64]]:
    return [seen[name]] if name in seen else []


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _total(keys: Keys) -> int:
    return sum(map(len, keys.values()))
