"""Recursive bisection, the reference in `bench cluster`: halves of halves, then each sample moves at most once."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Jagged

ITERATIONS = 5
MOST_OVERLOAD = 1.05
SEED = 1

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def bisection_parts(features: Sequence[Jagged], num_distinct: int, num_parts: int) -> list[Tensor]:
    """Splits samples into `num_parts`, a power of 2, of about equal cost in keys."""
    num_samples = len(features[0])
    samples, keys = _pairs(features, num_distinct)
    cost = np.maximum(sum(feature.lengths.numpy() for feature in features), 1).astype(np.float64)
    parts = np.zeros(num_samples, np.int64)
    num_halved = 1
    while num_halved < num_parts:
        halves = np.zeros(num_samples, np.int64)
        for part in range(num_halved):
            members = np.flatnonzero(parts == part)
            halves[members] = _halve(members, samples, keys, parts == part, cost, num_distinct)
        parts = 2 * parts + halves
        num_halved *= 2
    _refine(parts, samples, keys, cost, num_distinct, num_parts)
    return [torch.from_numpy(np.flatnonzero(parts == part)) for part in range(num_parts)]


def _pairs(features: Sequence[Jagged], num_distinct: int) -> tuple[Integers, Integers]:
    """Returns the distinct pairs of a sample and a key of it."""
    pairs_by_feature = [
        np.repeat(np.arange(len(feature)), feature.lengths.numpy()) * num_distinct + feature.values.numpy()
        for feature in features
    ]
    pairs = np.unique(np.concatenate(pairs_by_feature))
    return pairs // num_distinct, pairs % num_distinct


def _halve(
    members: Integers, samples: Integers, keys: Integers, inside: NDArray[np.bool_], cost: Floats, num_distinct: int
) -> Integers:
    """Returns 0 or 1 for each member: halves of equal cost, in order of an approximate eigenvector."""
    is_inside = inside[samples]
    s, k = samples[is_inside], keys[is_inside]
    uses = np.bincount(k, minlength=num_distinct)
    shared = uses[k] > 1
    s, k = s[shared], k[shared]
    degree = np.bincount(s, minlength=len(inside))
    x = np.random.default_rng(SEED).uniform(-1, 1, len(inside))
    for _ in range(ITERATIONS):
        x -= (degree * x).sum() / max(degree.sum(), 1)
        key_mean = np.bincount(k, x[s], num_distinct) / np.maximum(uses, 1)
        x = np.bincount(s, key_mean[k], len(inside)) / np.maximum(degree, 1)
    order = np.argsort(x[members], kind="stable")
    middle = cost[members[order]].cumsum() - cost[members[order]] / 2
    halves = np.empty(len(members), np.int64)
    halves[order] = middle > cost[members].sum() / 2
    return halves


def _refine(
    parts: Integers, samples: Integers, keys: Integers, cost: Floats, num_distinct: int, num_parts: int
) -> None:
    """Moves each sample to the part that shares most keys with it, if that has room."""
    uses = np.zeros((num_distinct, num_parts), np.int64)
    np.add.at(uses, (keys, parts[samples]), 1)
    load = np.bincount(parts, cost, num_parts)
    most = MOST_OVERLOAD * cost.sum() / num_parts
    begin = np.searchsorted(samples, np.arange(len(parts) + 1))
    for sample in range(len(parts)):
        sample_keys = keys[begin[sample] : begin[sample + 1]]
        uses[sample_keys, parts[sample]] -= 1
        load[parts[sample]] -= cost[sample]
        present = (uses[sample_keys] > 0).sum(0) + 0.5 * (np.arange(num_parts) == parts[sample])
        room = load + cost[sample] <= most
        room[parts[sample]] = True
        parts[sample] = np.where(room, present, -1).argmax()
        uses[sample_keys, parts[sample]] += 1
        load[parts[sample]] += cost[sample]
