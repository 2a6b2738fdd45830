"""Small batches of keys for the tests of plan_ops, as plain lists."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.store.native import plan_ops
from nestpipe.store.oracle_values import hash_key

KEYS = st.one_of(st.integers(-1, 9), st.sampled_from([-(2**63), 2**63 - 1, -1, 2**62]))
WORLD_SIZES = st.sampled_from([1, 2, 3, 7, 1536])


class Feature(NamedTuple):
    keys: list[list[int]]
    """Keys of each sample."""
    table: int
    padding: int | None = None
    limit: int = 0

    @property
    def flat(self) -> list[int]:
        return [key for keys in self.keys for key in keys]


class Batch(NamedTuple):
    features: list[Feature]
    num_tables: int
    num_samples: int

    @property
    def names(self) -> list[str]:
        return [f"table {t}" for t in range(self.num_tables)]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num_samples, num_tables = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    tables = sorted(draw(st.lists(st.integers(0, num_tables - 1), max_size=6)))
    sample = st.lists(KEYS, max_size=draw(st.sampled_from([0, 1, 4])))
    lists = st.lists(sample, min_size=num_samples, max_size=num_samples)
    padding = st.one_of(st.none(), KEYS)
    return Batch([Feature(draw(lists), table, draw(padding)) for table in tables], num_tables, num_samples)


@st.composite
def cuts(draw: st.DrawFn, num_samples: int) -> tuple[list[int] | None, list[int]]:
    """Draws the order of the samples, and the offsets of parts."""
    num_parts = draw(st.sampled_from([1, 2, 3, 8, 9, 17]))
    inner = draw(st.lists(st.integers(0, num_samples), min_size=num_parts - 1, max_size=num_parts - 1))
    samples = draw(st.one_of(st.none(), st.permutations(range(num_samples))))
    return samples, [0, *sorted(inner), num_samples]


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def feature_keys(features: list[Feature]) -> tuple[np.ndarray, list[Tensor]]:
    """Returns rows for `dedup`, and the keys that they point to."""
    keys = [integers(feature.flat) for feature in features]
    rows = [
        [
            tensor.data_ptr(),
            len(tensor),
            feature.table,
            feature.padding is not None,
            feature.padding or 0,
            feature.limit,
        ]
        for tensor, feature in zip(keys, features, strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 6), keys


def feature_samples(features: list[Feature]) -> tuple[np.ndarray, list[Tensor]]:
    """Returns rows for `split`, and the offsets that they point to."""
    offsets = [integers([0, *np.cumsum([len(keys) for keys in feature.keys]).tolist()]) for feature in features]
    rows = [
        [tensor.data_ptr(), len(feature.flat), feature.table] for tensor, feature in zip(offsets, features, strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 3), offsets


def dedup(batch: Batch, world_size: int, num_threads: int = 1) -> plan_ops.Deduped:
    rows, _keys = feature_keys(batch.features)
    return plan_ops.dedup(rows, plan_ops.table_salts(batch.names), world_size, num_threads)


def owner(key: int, table: str, world_size: int) -> int:
    return (hash_key(key, table) >> 48) * world_size // 65536
