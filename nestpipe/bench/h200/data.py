"""Batches of sequences with given numbers of distinct keys, and of keys shared with the previous batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged


@dataclass(frozen=True)
class Shape:
    """Sizes of the batches."""

    batch_size: int = 512
    length: int = 512
    num_negatives: int = 128
    """Negatives of each sample."""
    num_distinct: int = 240_000
    """Distinct keys of a batch, negatives included."""
    overlap: float = 0.3
    """Share of a batch's keys that are also in the previous batch."""
    num_batches: int = 5
    """Number of different batches, which are repeated."""

    @property
    def num_occurrences(self) -> int:
        return self.batch_size * (self.length + 1 + self.num_negatives)


def make_batches(shape: Shape, num_keys: int, seed: int = 0) -> list[Batch]:
    """Makes batches of keys from 0 .. num_keys - 1. The first batch shares keys with the last."""
    random = np.random.default_rng(seed)
    num_shared = round(shape.num_distinct * shape.overlap)
    num_fresh = shape.num_distinct - num_shared
    if shape.num_batches * num_fresh > num_keys:
        raise ValueError(f"{num_keys} keys are too few for {shape.num_batches} batches of {num_fresh} new ones each")
    fresh = random.choice(num_keys, (shape.num_batches, num_fresh), replace=False)
    batches = []
    for number, mine in enumerate(fresh):
        shared = random.choice(fresh[number - 1], num_shared, replace=False)
        batches.append(_batch(shape, np.concatenate([mine, shared]), random))
    return batches


def _batch(shape: Shape, distinct: np.ndarray, random: np.random.Generator) -> Batch:
    """Makes a batch in which each distinct key occurs at least once, and the others are random."""
    more = random.choice(distinct, shape.num_occurrences - len(distinct))
    keys = torch.from_numpy(random.permutation(np.concatenate([distinct, more])))
    history, target, negatives = keys.split(
        [shape.batch_size * shape.length, shape.batch_size, shape.batch_size * shape.num_negatives]
    )
    times = torch.from_numpy(random.integers(1, 10_000, (shape.batch_size, shape.length + 1))).cumsum(1)
    return Batch(
        {
            "history": _equal_lengths(history, shape.length),
            "target": _equal_lengths(target, 1),
            "negatives": _equal_lengths(negatives, shape.num_negatives),
        },
        {"times": times},
        weight=float(len(history)),
    )


def _equal_lengths(keys: Tensor, length: int) -> Jagged:
    return Jagged(keys.contiguous(), torch.arange(0, len(keys) + 1, length))
