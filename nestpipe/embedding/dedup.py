"""The requester's dedup of a batch: the rows that it needs, and where they are used.

For each table group: the distinct keys of the batch, ascending by (owner, table, first use). The index of a key in this
list is its position, by which later stages refer to it. A micro-batch has the rows of its own distinct keys, table
after table. The row index of a feature gives, for each of its keys, the row among those of its table.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.bags import Bags, split_bags
from nestpipe.embedding.cluster import GIVEN_ORDER, Clustering
from nestpipe.embedding.group import FeatureGroups, TableGroup
from nestpipe.embedding.key_lists import (
    SampleOrder,
    contiguous_keys,
    feature_key_lists,
    feature_sample_lists,
    group_weights,
    outside_error,
)
from nestpipe.store.native import plan_ops

MOST_LOSSES = 8


@dataclass(frozen=True)
class FeaturePart:
    """The occurrences of a feature's keys in one micro-batch."""

    index: Tensor
    """[n] row of each key among those of its table; one past the last row for padding."""
    offsets: Tensor
    """[samples + 1] start of each sample."""
    weights: Tensor | None
    """[n] weight of each key."""


@dataclass(frozen=True)
class HostOccurrences:
    """The occurrences of all features of a group, in host memory."""

    index: Tensor
    """[occurrences] by (micro-batch, feature, sample): the row among those of the feature's table; for padding, the
    number of those rows."""
    index_offsets: NDArray[np.int64]
    """[micro-batches * features + 1] start of each feature's part of `index`."""
    offsets: Tensor
    """[samples + 1] for each (micro-batch, feature): start of its samples in its part of `index`."""
    weights: Tensor | None
    """[occurrences] of the table's dtype, in the order of `index`; None if no feature of the group has weights."""
    is_weighted: list[bool]
    """True for each feature with weights."""
    num_samples: list[int]
    """Samples of each micro-batch."""

    @cached_property
    def _index_bounds(self) -> list[int]:
        bounds: list[int] = self.index_offsets.tolist()
        return bounds

    def part(self, micro_batch: int, feature: int) -> FeaturePart:
        """Returns the occurrences of one feature in one micro-batch."""
        num_features, num_samples = len(self.is_weighted), self.num_samples[micro_batch]
        first, end = self._index_bounds[(at := micro_batch * num_features + feature) : at + 2]
        start = num_features * (sum(self.num_samples[:micro_batch]) + micro_batch) + feature * (num_samples + 1)
        weights = self.weights[first:end] if self.weights is not None and self.is_weighted[feature] else None
        return FeaturePart(self.index[first:end], self.offsets[start : start + num_samples + 1], weights)

    def map(self, function: Callable[[Tensor], Tensor]) -> "HostOccurrences":
        weights = None if self.weights is None else function(self.weights)
        return replace(self, index=function(self.index), offsets=function(self.offsets), weights=weights)


class Occurrences(Protocol):
    """The occurrences of all features of a group: HostOccurrences, or GroupOccurrences of fused.py."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Occurrences":
        """Replaces every tensor in the memory of the rows."""


@dataclass(frozen=True)
class RequesterDedup:
    """One table group of a batch, on the rank that uses it."""

    group: TableGroup
    keys: Tensor
    """[n] distinct keys, by position."""
    counts: Tensor
    """[ranks, tables] int32: distinct keys of each table that each rank owns."""
    uses: Tensor
    """[n, bytes] bits, least significant first: bit i is set if micro-batch i uses the key."""
    row_positions: Tensor
    """Positions of the rows of each micro-batch, concatenated; within a micro-batch by (table, position)."""
    is_first: Tensor
    """[row positions] bool: True if no earlier micro-batch has the position."""
    row_counts: NDArray[np.int64]
    """[micro-batches, tables] number of rows."""
    row_offsets: list[int]
    """[micro-batches + 1] start of each micro-batch in row_positions."""
    num_samples: list[int]
    """Samples of each micro-batch."""
    occurrences: Occurrences
    """Where the rows are used."""

    @property
    def counts_by_owner(self) -> NDArray[np.int64]:
        """Returns the [ranks] distinct keys that each rank owns."""
        counts: NDArray[np.int64] = self.counts.numpy().sum(axis=1, dtype=np.int64)
        return counts

    def rows_of(self, micro_batch: int) -> slice:
        """Returns the slice of row_positions and is_first that belongs to a micro-batch."""
        return slice(*self.row_offsets[micro_batch : micro_batch + 2])

    def num_rows(self, micro_batch: int) -> int:
        return self.row_offsets[micro_batch + 1] - self.row_offsets[micro_batch]

    def map(self, function: Callable[[Tensor], Tensor]) -> "RequesterDedup":
        """Replaces every tensor in the memory of the rows."""
        return replace(
            self,
            row_positions=function(self.row_positions),
            is_first=function(self.is_first),
            occurrences=self.occurrences.map(function),
        )


@dataclass(frozen=True)
class BatchDedup:
    """A batch, ready to be routed."""

    groups: list[RequesterDedup]
    inputs: list[Mapping[str, Tensor]]
    """Inputs of each micro-batch."""
    num_samples: list[int]
    """Samples of each micro-batch."""
    weights: dict[str, float]
    has_batch: bool
    """False if this rank is out of data and takes part with an empty batch."""
    bags: list[Bags] = field(default_factory=list)
    """Bags of the groups with features that are pooled at the owner, in order of FeatureGroups.bag_groups."""

    def asking(self, ranks: range, num_ranks: int) -> "BatchDedup":
        """Returns the batch with these of all ranks as owners. So far owners are counted from 0."""

        def counts_of(group: RequesterDedup) -> Tensor:
            counts = group.counts.new_zeros(num_ranks, group.counts.shape[1])
            counts[ranks.start : ranks.stop] = group.counts
            return counts

        return replace(self, groups=[replace(group, counts=counts_of(group)) for group in self.groups])

    @property
    def num_micro_batches(self) -> int:
        return len(self.num_samples)

    def map(self, function: Callable[[Tensor], Tensor]) -> "BatchDedup":
        """Replaces every tensor in the memory of the rows."""
        return replace(
            self,
            groups=[group.map(function) for group in self.groups],
            inputs=[{name: function(value) for name, value in part.items()} for part in self.inputs],
            bags=[bags.map(function) for bags in self.bags],
        )


def dedup_batch(
    features: FeatureGroups,
    batch: Batch | None,
    num_micro_batches: int,
    world_size: int,
    num_threads: int = 1,
    clustering: Clustering = GIVEN_ORDER,
) -> BatchDedup:
    """Finds the distinct keys of a batch and splits it into micro-batches. batch: None if this rank is out of data."""
    has_batch = batch is not None
    batch = checked_batch(features, batch)
    distinct = [_distinct(group, batch, world_size, num_threads) for group in features.groups]
    order = sample_order(features, distinct, batch, num_micro_batches, clustering)
    groups = [_split(group, order) for group in distinct]
    bags = split_bags(features, batch, order, world_size, num_threads)
    return BatchDedup(groups, split_inputs(batch, order), order.sizes, batch.weights, has_batch, bags)


def checked_batch(features: FeatureGroups, batch: Batch | None) -> Batch:
    """Returns a batch, an empty one for None, after checks that need not look at its keys."""
    if batch is None:
        batch = Batch({name: Jagged.from_lists([]) for name in features.features}, weight={})
    _check_features(features, batch)
    check_weights(batch)
    check_inputs(batch)
    return batch


def check_weights(batch: Batch) -> None:
    """Refuses weights that are negative or not finite, and more weights than fit the route's header."""
    if len(batch.weights) > MOST_LOSSES:
        raise ValueError(f"the batch has {len(batch.weights)} weights; at most {MOST_LOSSES} losses are supported")
    for name, weight in batch.weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the weight{f' of loss {name!r}' if name else ''} of a batch is {weight}, must be >= 0")


def check_inputs(batch: Batch) -> None:
    """Refuses inputs that are not tensors: they cannot be split, nor copied to a device."""
    for name, value in batch.inputs.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"input {name!r} of a batch must be a torch.Tensor, got {type(value).__name__}")


def _check_features(features: FeatureGroups, batch: Batch) -> None:
    if features.features.keys() != batch.keys.keys():
        missing = sorted(features.features.keys() - batch.keys.keys())
        unknown = sorted(batch.keys.keys() - features.features.keys())
        raise ValueError(f"the batch's features do not match: missing {missing}, unknown {unknown}")


@dataclass(frozen=True)
class DistinctKeys:
    """The distinct keys of one group in a batch."""

    group: TableGroup
    jagged: list[Jagged]
    """Keys of each feature, contiguous."""
    keys: Tensor
    counts: Tensor
    positions: Tensor
    """[occurrences] of all features, concatenated; -1 or len(keys) for padding."""


def _distinct(group: TableGroup, batch: Batch, world_size: int, num_threads: int) -> DistinctKeys:
    jagged = contiguous_keys(group, batch)
    deduped = plan_ops.dedup(feature_key_lists(group, jagged), group.salts, world_size, num_threads)
    if deduped.outside is not None:
        raise outside_error(group, jagged, *deduped.outside)
    return DistinctKeys(group, jagged, deduped.keys, deduped.counts, deduped.positions)


def sample_order(
    features: FeatureGroups, distinct: list[DistinctKeys], batch: Batch, num_parts: int, clustering: Clustering
) -> SampleOrder:
    """Clusters the samples into micro-batches, by the keys whose rows travel. If none do, they keep their order."""
    if clustering.keeps_order(num_parts) or not any(group.jagged for group in distinct):
        return SampleOrder.in_order(len(batch), num_parts)
    numbered, num_distinct = _cluster_lists(features, distinct)
    return SampleOrder(clustering.parts(numbered, num_distinct, num_parts))


def _cluster_lists(features: FeatureGroups, distinct: list[DistinctKeys]) -> tuple[list[Jagged], int]:
    """Returns the keys of each feature as numbers among the distinct keys of all tables, in order of the tables' names.

    The order matters: clustering breaks ties by it, and it must not depend on how tables are grouped.
    """
    table_counts = np.concatenate([group.counts.sum(0).numpy() for group in distinct])
    bases = np.zeros_like(table_counts)
    ordered = table_counts[features.table_order]
    bases[features.table_order] = np.cumsum(ordered) - ordered
    lists: list[tuple[int, Jagged]] = []
    table_places = np.argsort(features.table_order)
    first = 0
    for group in distinct:
        num_tables = len(group.group.tables)
        group_bases = torch.from_numpy(bases[first : first + num_tables].copy())
        numbers = torch.cat([plan_ops.cluster_numbers(group.counts, group_bases, len(group.keys)), torch.tensor([-1])])
        parts = numbers[group.positions].split([lists.values.numel() for lists in group.jagged])
        for table, jagged, values in zip(group.group.feature_tables.tolist(), group.jagged, parts, strict=True):
            lists.append((int(table_places[first + table]), Jagged(values, jagged.offsets)))
        first += num_tables
    lists.sort(key=lambda item: item[0])
    return [jagged for _, jagged in lists], int(table_counts.sum())


def _split(distinct: DistinctKeys, order: SampleOrder) -> RequesterDedup:
    group, jagged = distinct.group, distinct.jagged
    is_weighted = [lists.weights is not None for lists in jagged]
    split = plan_ops.split(
        feature_sample_lists(group, jagged),
        distinct.positions,
        distinct.counts,
        len(distinct.keys),
        order.samples,
        order.part_offsets,
        sum(order.sizes),
        with_sources=any(is_weighted),
    )
    row_counts = split.row_counts.numpy()
    return RequesterDedup(
        group=group,
        keys=distinct.keys,
        counts=distinct.counts,
        uses=split.uses,
        row_positions=split.row_positions,
        is_first=split.is_first,
        row_counts=row_counts,
        row_offsets=[0, *np.cumsum(row_counts.sum(1)).tolist()],
        num_samples=order.sizes,
        occurrences=HostOccurrences(
            index=split.index,
            index_offsets=split.index_offsets.numpy(),
            offsets=split.offsets,
            weights=None if split.sources is None else group_weights(group, jagged)[split.sources],
            is_weighted=is_weighted,
            num_samples=order.sizes,
        ),
    )


def split_inputs(batch: Batch, order: SampleOrder) -> list[Mapping[str, Tensor]]:
    """Returns the inputs of each micro-batch."""
    if order.samples is None:
        return [batch.inputs]
    inputs = {name: value[order.samples].split(order.sizes) for name, value in batch.inputs.items()}
    return [{name: values[i] for name, values in inputs.items()} for i in range(order.num_parts)]
