"""Batches of `bench exchange`: skewed keys of a large table, so that ranks share many of them, and keys of small hot
tables, all of which every rank uses; and bags of many keys."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from nestpipe.bench.harness.keys import zipf_ranks
from nestpipe.bench.network.loop import FEATURE, SEED
from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.optim import Adagrad
from nestpipe.embedding.table import Feature, Pooled, Table


@dataclass(frozen=True)
class Size:
    """Sizes for which a host receives rows for about 0.1 seconds on a link of 1 gbit."""

    batch_size: int = 512
    dim: int = 64
    num_keys: int = 2_000_000
    num_occurrences: int = 100_000
    """Of a rank's batch."""
    num_batches: int = 3
    num_rounds: int = 5
    num_small_tables: int = 8
    rows_of_a_small_table: int = 1_000
    small_keys_a_sample: int = 20
    """Keys of a sample in each small table."""
    num_hot_keys: int = 50_000
    """Keys of the table whose rows travel in one hop or in two: the ranks of a host share many of them."""
    num_hot_occurrences: int = 500_000
    num_bag_features: int = 8
    keys_of_a_bag: int = 20
    keys_of_a_bag_table: int = 15_000


QUICK = Size(
    batch_size=32,
    num_keys=5_000,
    num_occurrences=600,
    num_batches=2,
    num_rounds=2,
    rows_of_a_small_table=60,
    num_hot_keys=500,
    num_hot_occurrences=1_000,
    keys_of_a_bag_table=1_000,
)


def make_batches(size: Size, rank: int) -> list[Batch]:
    """Makes a rank's batches. Input `share` is the sample's share of the batch's keys."""
    return [_batch(size, np.random.default_rng([SEED, number, rank])) for number in range(size.num_batches)]


def make_hot_batches(size: Size, rank: int) -> list[Batch]:
    """Makes a rank's batches of fewer keys, which are used more often."""
    return make_batches(replace(size, num_keys=size.num_hot_keys, num_occurrences=size.num_hot_occurrences), rank)


def _batch(size: Size, random: np.random.Generator) -> Batch:
    keys = torch.from_numpy(zipf_ranks(size.num_keys, size.num_occurrences, random))
    bounds = np.sort(random.integers(0, len(keys) + 1, size.batch_size - 1))
    offsets = torch.from_numpy(np.concatenate([[0], bounds, [len(keys)]]))
    share = offsets.diff().double() / len(keys)
    return Batch({FEATURE: Jagged(keys, offsets)}, {"label": torch.zeros(size.batch_size), "share": share})


def small_tables(size: Size, placement: str) -> dict[str, Feature]:
    """Returns a feature for each of the small tables."""
    names = [f"small{number}" for number in range(size.num_small_tables)]
    tables = [Table(name, size.dim, optimizer=Adagrad(0.01), placement=placement) for name in names]
    return {table.name: Pooled(table) for table in tables}


def make_small_batches(size: Size, rank: int) -> list[Batch]:
    """Makes a rank's batches of the small tables: keys are uniform, so that a batch has nearly all of them."""
    names = list(small_tables(size, "sharded"))
    return _uniform_batches(size, rank, names, size.small_keys_a_sample, size.rows_of_a_small_table)


def bag_features(size: Size, where: str) -> dict[str, Feature]:
    """Returns pooled features with many keys a sample, each with a table of its own."""
    tables = [Table(f"bag{number}", size.dim, optimizer=Adagrad(0.01)) for number in range(size.num_bag_features)]
    return {table.name: Pooled(table, where=where) for table in tables}


def make_bag_batches(size: Size, rank: int) -> list[Batch]:
    """Makes a rank's batches of bags: keys are uniform, so that most of a batch's keys are distinct."""
    names = list(bag_features(size, "requester"))
    return _uniform_batches(size, rank, names, size.keys_of_a_bag, size.keys_of_a_bag_table)


def distinct_share(batches: list[Batch]) -> float:
    """Returns the share of keys that are distinct in a batch and feature, the least of all."""
    lists = [jagged.values for batch in batches for jagged in batch.keys.values()]
    return min(len(values.unique()) / len(values) for values in lists)


def _uniform_batches(size: Size, rank: int, names: list[str], per_sample: int, num_keys: int) -> list[Batch]:
    randoms = [np.random.default_rng([SEED, number, rank]) for number in range(size.num_batches)]
    return [_uniform_batch(size.batch_size, random, names, per_sample, num_keys) for random in randoms]


def _uniform_batch(number: int, random: np.random.Generator, names: list[str], per_sample: int, num_keys: int) -> Batch:
    offsets = torch.arange(0, number * per_sample + 1, per_sample)
    values = {name: torch.from_numpy(random.integers(0, num_keys, number * per_sample)) for name in names}
    keys = {name: Jagged(drawn, offsets) for name, drawn in values.items()}
    return Batch(keys, {"label": torch.zeros(number), "share": torch.full((number,), 1 / number, dtype=torch.float64)})
