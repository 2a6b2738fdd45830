"""Batches of sequences whose distinct keys, and those shared with the batch before, are as many as asked for."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged


@dataclass(frozen=True)
class Shape:
    batch_size: int = 512
    length: int = 512
    num_negatives: int = 128
    """of each sample"""
    num_distinct: int = 240_000
    """keys of a batch, negatives included"""
    overlap: float = 0.3
    """share of a batch's keys that the batch before it has, too"""
    num_batches: int = 5
    """after which they begin again"""

    @property
    def num_occurrences(self) -> int:
        return self.batch_size * (self.length + 1 + self.num_negatives)


class Repeating(Iterator[Batch]):
    """The same few batches, over and over: what reads data is not what is measured."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches
        self._number = 0

    def __next__(self) -> Batch:
        self._number += 1
        return self._batches[(self._number - 1) % len(self._batches)]


def make_batches(shape: Shape, num_keys: int, seed: int = 0) -> list[Batch]:
    """Keys all over 0 .. num_keys - 1; the last batch shares with the first."""
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
    """Each key at least once, the rest at random."""
    more = random.choice(distinct, shape.num_occurrences - len(distinct))
    keys = torch.from_numpy(random.permutation(np.concatenate([distinct, more])))
    history, target, negatives = keys.split(
        [shape.batch_size * shape.length, shape.batch_size, shape.batch_size * shape.num_negatives]
    )
    times = torch.from_numpy(random.integers(1, 10_000, (shape.batch_size, shape.length + 1))).cumsum(1)
    return Batch(
        {
            "history": _equal(history, shape.length),
            "target": _equal(target, 1),
            "negatives": _equal(negatives, shape.num_negatives),
        },
        {"times": times},
        weight=float(len(history)),
    )


def _equal(keys: Tensor, length: int) -> Jagged:
    return Jagged(keys.contiguous(), torch.arange(0, len(keys) + 1, length))
