"""Batches of `bench exchange`: skewed keys, so that ranks share many of them."""

from dataclasses import dataclass

import numpy as np
import torch

from nestpipe.bench.harness.keys import zipf_ranks
from nestpipe.bench.network.loop import FEATURE, SEED
from nestpipe.data.batch import Batch, Jagged


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


QUICK = Size(batch_size=32, num_keys=5_000, num_occurrences=600, num_batches=2, num_rounds=2)


def make_batches(size: Size, rank: int) -> list[Batch]:
    """Makes a rank's batches. Input `share` is the sample's share of the batch's keys."""
    return [_batch(size, np.random.default_rng([SEED, number, rank])) for number in range(size.num_batches)]


def _batch(size: Size, random: np.random.Generator) -> Batch:
    keys = torch.from_numpy(zipf_ranks(size.num_keys, size.num_occurrences, random))
    bounds = np.sort(random.integers(0, len(keys) + 1, size.batch_size - 1))
    offsets = torch.from_numpy(np.concatenate([[0], bounds, [len(keys)]]))
    share = offsets.diff().double() / len(keys)
    return Batch({FEATURE: Jagged(keys, offsets)}, {"label": torch.zeros(size.batch_size), "share": share})
