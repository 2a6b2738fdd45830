"""The requester's dedup of a batch: which rows it needs, and where they go.

For each table group: the distinct keys of the batch, ascending by (owner, table, first use). The place of a key in this
list is its position; all that follows speaks of positions. A micro-batch has the rows of its own distinct keys, table
after table; the row index of a feature says which of its table's rows each key has.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.cluster import GIVEN_ORDER, Clustering, in_order
from nestpipe.embedding.group import FeatureGroups, TableGroup
from nestpipe.kernels.rows.pooling import DeviceOccurrences
from nestpipe.store.native import plan_ops

MOST_LOSSES = 8


@dataclass(frozen=True)
class FeaturePart:
    """The occurrences of a feature's keys in one micro-batch."""

    index: Tensor
    """[n] row of each key among those of its table; one beyond the last row for padding"""
    offsets: Tensor
    """[samples + 1] where each sample begins"""
    host_offsets: Tensor
    """the same, in host memory"""
    weights: Tensor | None
    """[n] one for each key"""


@dataclass(frozen=True)
class RequesterDedup:
    """One table group of a batch, on the rank that uses it."""

    group: TableGroup
    keys: Tensor
    """[n] distinct keys, by position"""
    counts: Tensor
    """[ranks, tables] int32: distinct keys that each owner has of each table"""
    uses: Tensor
    """[n, bytes] a bit for each micro-batch, least significant first: whether it uses the key"""
    row_positions: Tensor
    """positions of the rows of each micro-batch, one behind the other; those of a micro-batch by (table, position)"""
    is_first: Tensor
    """bool for each of them: whether no earlier micro-batch has this position"""
    row_counts: NDArray[np.int64]
    """[micro-batches, tables] rows of each"""
    row_offsets: list[int]
    """[micro-batches + 1] where each begins in row_positions"""
    index: Tensor
    """[occurrences] by (micro-batch, feature, sample): the row among those of the feature's table; the number of
    those rows stands for padding"""
    index_offsets: NDArray[np.int64]
    """[micro-batches * features + 1] where each feature's part of `index` begins"""
    offsets: Tensor
    """[samples + 1] for each (micro-batch, feature): where its samples begin in its part of `index`"""
    host_offsets: Tensor
    """the same, in host memory"""
    weights: Tensor | None
    """[occurrences] of the table's dtype, in the order of `index`; None if no feature of the group has any"""
    is_weighted: list[bool]
    """by feature"""
    num_samples: list[int]
    """by micro-batch"""
    occurrences: list[dict[str, DeviceOccurrences]] = field(default_factory=list)
    """by micro-batch and feature, as kernels of a device need them; empty in host memory"""

    def part(self, micro_batch: int, feature: int) -> "FeaturePart":
        """Returns the occurrences of one feature in one micro-batch."""
        num_features, num_samples = len(self.group.features), self.num_samples[micro_batch]
        first, end = self.index_offsets[micro_batch * num_features + feature :][:2].tolist()
        start = num_features * (sum(self.num_samples[:micro_batch]) + micro_batch) + feature * (num_samples + 1)
        offsets = slice(start, start + num_samples + 1)
        weights = self.weights[first:end] if self.weights is not None and self.is_weighted[feature] else None
        return FeaturePart(self.index[first:end], self.offsets[offsets], self.host_offsets[offsets], weights)

    def rows_of(self, micro_batch: int) -> slice:
        """The part of row_positions and is_first that a micro-batch has."""
        return slice(*self.row_offsets[micro_batch : micro_batch + 2])

    def num_rows(self, micro_batch: int) -> int:
        return self.row_offsets[micro_batch + 1] - self.row_offsets[micro_batch]

    def map(self, function: Callable[[Tensor], Tensor]) -> "RequesterDedup":
        """Replaces every tensor that goes to the device."""
        return replace(
            self,
            row_positions=function(self.row_positions),
            is_first=function(self.is_first),
            index=function(self.index),
            offsets=function(self.offsets),
            weights=None if self.weights is None else function(self.weights),
            occurrences=[{name: made.map(function) for name, made in parts.items()} for parts in self.occurrences],
        )


@dataclass(frozen=True)
class BatchDedup:
    """A batch, ready to be routed."""

    groups: list[RequesterDedup]
    inputs: list[Mapping[str, Tensor]]
    """by micro-batch"""
    num_samples: list[int]
    """by micro-batch"""
    weights: dict[str, float]
    has_batch: bool
    """False: this rank is out of data, and takes part with nothing"""

    @property
    def num_micro_batches(self) -> int:
        return len(self.num_samples)

    def map(self, function: Callable[[Tensor], Tensor]) -> "BatchDedup":
        """Replaces every tensor that goes to the device."""
        return replace(
            self,
            groups=[group.map(function) for group in self.groups],
            inputs=[{name: function(value) for name, value in part.items()} for part in self.inputs],
        )


def dedup_batch(
    features: FeatureGroups,
    batch: Batch | None,
    num_micro_batches: int,
    world_size: int,
    num_threads: int = 1,
    clustering: Clustering = GIVEN_ORDER,
) -> BatchDedup:
    """Finds the distinct keys of a batch and splits it into micro-batches. None: this rank has no batch, others may."""
    has_batch = batch is not None
    if batch is None:
        batch = Batch({name: Jagged.from_lists([]) for name in features.features}, weight={})
    _check_features(features, batch)
    check_weights(batch)
    check_inputs(batch)
    distinct = [_Distinct.of(group, batch, world_size, num_threads) for group in features.groups]
    parts = _parts(features, distinct, batch, num_micro_batches, clustering)
    order = _Order(parts)
    return BatchDedup(
        [_split(group, order) for group in distinct],
        _inputs(batch, order),
        order.sizes,
        batch.weights,
        has_batch,
    )


def check_weights(batch: Batch) -> None:
    """Refuses weights that no sum of losses can be divided by, or that do not fit the route's header."""
    if len(batch.weights) > MOST_LOSSES:
        raise ValueError(f"the batch has {len(batch.weights)} weights; at most {MOST_LOSSES} losses are supported")
    for name, weight in batch.weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the weight{f' of loss {name!r}' if name else ''} of a batch is {weight}, must be >= 0")


def check_inputs(batch: Batch) -> None:
    """Refuses what cannot be cut into micro-batches, and cannot go to a device."""
    for name, value in batch.inputs.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"input {name!r} of a batch must be a torch.Tensor, got {type(value).__name__}")


def _check_features(features: FeatureGroups, batch: Batch) -> None:
    if features.features.keys() != batch.keys.keys():
        missing = sorted(features.features.keys() - batch.keys.keys())
        unknown = sorted(batch.keys.keys() - features.features.keys())
        raise ValueError(f"the batch's features do not match: missing {missing}, unknown {unknown}")


@dataclass(frozen=True)
class _Distinct:
    """The distinct keys of one group in a batch."""

    group: TableGroup
    jagged: list[Jagged]
    """by feature; in one piece of memory each"""
    keys: Tensor
    counts: Tensor
    positions: Tensor
    """[occurrences] of all features, one behind the other; -1 for padding"""

    @staticmethod
    def of(group: TableGroup, batch: Batch, world_size: int, num_threads: int) -> "_Distinct":
        jagged = [_contiguous(batch.keys[name]) for name in group.features]
        features = group.feature_keys.copy()
        features[:, 0] = [lists.values.data_ptr() for lists in jagged]
        features[:, 1] = [lists.values.numel() for lists in jagged]
        found = plan_ops.dedup(features, group.salts, world_size, num_threads)
        if found.outside is not None:
            raise _outside_error(group, jagged, *found.outside)
        return _Distinct(group, jagged, found.keys, found.counts, found.positions)


def _contiguous(jagged: Jagged) -> Jagged:
    if jagged.values.is_contiguous() and jagged.offsets.is_contiguous():
        return jagged
    return Jagged(jagged.values.contiguous(), jagged.offsets.contiguous(), jagged.weights)


def _outside_error(group: TableGroup, jagged: list[Jagged], feature: int, occurrence: int) -> ValueError:
    table, lists = group.tables[int(group.feature_tables[feature])], jagged[feature]
    sample = int(torch.searchsorted(lists.offsets, occurrence, right=True)) - 1
    assert table.num_keys is not None
    return ValueError(
        f"feature {group.features[feature]!r}, sample {sample}: key {int(lists.values[occurrence])} is outside "
        f"0 .. {table.num_keys - 1}, the keys of table {table.name!r} (num_keys = {table.num_keys})"
    )


def _parts(
    features: FeatureGroups, distinct: list[_Distinct], batch: Batch, num_parts: int, clustering: Clustering
) -> list[Tensor]:
    """Returns the samples of each micro-batch."""
    if clustering.keeps_order(num_parts):
        return in_order(len(batch), num_parts)
    numbered, num_distinct = _cluster_lists(features, distinct)
    return clustering.parts(numbered, num_distinct, num_parts)


def _cluster_lists(features: FeatureGroups, distinct: list[_Distinct]) -> tuple[list[Jagged], int]:
    """Returns the keys of each feature as numbers among the distinct keys of all tables, in order of the tables' names.

    The order matters: clustering breaks ties by it, and it must not depend on how tables are grouped.
    """
    per_table = np.concatenate([group.counts.sum(0).numpy() for group in distinct])
    bases = np.zeros_like(per_table)
    ordered = per_table[features.table_order]
    bases[features.table_order] = np.cumsum(ordered) - ordered
    lists: list[tuple[int, Jagged]] = []
    rank_of_table = np.argsort(features.table_order)
    first = 0
    for group in distinct:
        num_tables = len(group.group.tables)
        of_group = torch.from_numpy(bases[first : first + num_tables].copy())
        numbers = torch.cat([plan_ops.cluster_numbers(group.counts, of_group, len(group.keys)), torch.tensor([-1])])
        parts = numbers[group.positions].split([lists.values.numel() for lists in group.jagged])
        for table, jagged, values in zip(group.group.feature_tables.tolist(), group.jagged, parts, strict=True):
            lists.append((int(rank_of_table[first + table]), Jagged(values, jagged.offsets)))
        first += num_tables
    lists.sort(key=lambda item: item[0])
    return [jagged for _, jagged in lists], int(per_table.sum())


class _Order:
    """The samples of a batch in the order of its micro-batches."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.sizes = [len(part) for part in parts]
        self.samples = torch.cat(parts) if len(parts) > 1 else None
        """None: as they are"""
        self.part_offsets = torch.tensor([0, *self.sizes]).cumsum(0)

    @property
    def num_parts(self) -> int:
        return len(self.sizes)


def _split(distinct: _Distinct, order: _Order) -> RequesterDedup:
    group, jagged = distinct.group, distinct.jagged
    features = np.empty((len(jagged), 3), dtype=np.int64)
    features[:, 0] = [lists.offsets.data_ptr() for lists in jagged]
    features[:, 1] = [lists.values.numel() for lists in jagged]
    features[:, 2] = group.feature_tables
    is_weighted = [lists.weights is not None for lists in jagged]
    made = plan_ops.split(
        features,
        distinct.positions,
        distinct.counts,
        len(distinct.keys),
        order.samples,
        order.part_offsets,
        sum(order.sizes),
        with_sources=any(is_weighted),
    )
    row_counts = made.row_counts.numpy()
    return RequesterDedup(
        group=group,
        keys=distinct.keys,
        counts=distinct.counts,
        uses=made.uses,
        row_positions=made.row_positions,
        is_first=made.is_first,
        row_counts=row_counts,
        row_offsets=[0, *np.cumsum(row_counts.sum(1)).tolist()],
        index=made.index,
        index_offsets=made.index_offsets.numpy(),
        offsets=made.offsets,
        host_offsets=made.offsets,
        weights=None if made.sources is None else _weights(group, jagged)[made.sources],
        is_weighted=is_weighted,
        num_samples=order.sizes,
    )


def _weights(group: TableGroup, jagged: list[Jagged]) -> Tensor:
    """Returns the weights of all occurrences of a group, 1 where a feature has none."""
    ones = torch.ones(max(lists.values.numel() for lists in jagged), dtype=group.dtype)
    parts = [
        ones[: lists.values.numel()] if lists.weights is None else lists.weights.to(group.dtype) for lists in jagged
    ]
    return torch.cat(parts)


def _inputs(batch: Batch, order: _Order) -> list[Mapping[str, Tensor]]:
    if order.samples is None:
        return [batch.inputs]
    inputs = {name: value[order.samples].split(order.sizes) for name, value in batch.inputs.items()}
    return [{name: values[i] for name, values in inputs.items()} for i in range(order.num_parts)]
