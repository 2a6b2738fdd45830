"""A batch as an accelerator gets it: the keys of each table group in one piece of pinned memory, and where its samples
lie. The device finds the distinct keys itself (device_dedup.py)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.batch_copy import CopiedBatch, shared_range
from nestpipe.embedding.cluster import Clustering
from nestpipe.embedding.dedup import checked_batch
from nestpipe.embedding.group import FeatureGroups, TableGroup
from nestpipe.embedding.key_lists import (
    SampleOrder,
    contiguous_keys,
    feature_key_lists,
    feature_sample_lists,
    group_weights,
    outside_error,
)
from nestpipe.store.native import pack_ops

NewBytes = Callable[[int], Tensor]
"""Returns so many bytes of host memory, from which copies to the device are fastest."""


@dataclass(frozen=True)
class PackedKeys:
    """The keys of one table group, feature after feature."""

    group: TableGroup
    jagged: list[Jagged]
    """Keys of each feature, contiguous."""
    keys: Tensor
    """[n] the same in one array."""
    tables: Tensor | None
    """[n] int16: table of each key, their number for padding; None if no feature has padding."""
    table_bounds: NDArray[np.int64]
    """[tables + 1] first key of each table, then the number of keys."""
    weights: Tensor | None
    """[n] weights of all keys, of the table's dtype; None if no feature has weights."""
    is_one_each: bool
    """True if it is known that every feature has one key in each sample."""

    @staticmethod
    def from_batch(group: TableGroup, batch: Batch, num_threads: int, new_bytes: NewBytes) -> "PackedKeys":
        jagged, num_tables = contiguous_keys(group, batch), len(group.tables)
        lists = feature_key_lists(group, jagged)
        ends = np.concatenate([[0], np.cumsum(lists[:, 1])])  # of features, which are ordered by table
        has_padding, has_limit = bool(lists[:, 3].any()), bool(lists[:, 5].any())
        copied = batch.group_keys.get(group.features) if isinstance(batch, CopiedBatch) else None
        keys = new_bytes(_INT64 * int(ends[-1])).view(torch.int64) if copied is None else copied
        tables = new_bytes(_INT16 * int(ends[-1])).view(torch.int16) if has_padding else None
        if copied is None or has_padding or has_limit:
            to = (None if copied is not None else keys), tables
            outside = pack_ops.pack_keys(lists, num_tables, *to, num_threads)
            if outside is not None:
                raise outside_error(group, jagged, *outside)
        bounds = ends[np.searchsorted(lists[:, 2], np.arange(num_tables + 1))]
        is_weighted = any(lists.weights is not None for lists in jagged)
        weights = group_weights(group, jagged) if is_weighted else None
        is_one_each = isinstance(batch, CopiedBatch) and batch.one_each.issuperset(group.features)
        return PackedKeys(group, jagged, keys, tables, bounds, weights, is_one_each)


_INT64, _INT16 = 8, 2


@dataclass(frozen=True)
class SampleLayout:
    """Where the samples of a group lie if its occurrences are ordered by (micro-batch, feature, sample).

    A segment is one sample of one feature, a block is all samples of one feature in one micro-batch.
    """

    bounds: Tensor
    """[segments + 1] in host memory: first occurrence of each segment, then their number."""
    is_one_each: bool
    """True if each segment has one occurrence."""
    sources: Tensor | None
    """[segments] the same occurrence in the order of PackedKeys; None if that is the same order."""
    block_bounds: NDArray[np.int64]
    """[blocks + 1] first occurrence of each block, then their number."""
    block_segments: NDArray[np.int64]
    """[blocks + 1] first segment of each block, then their number."""
    longest: int
    """Most keys of a segment."""

    @staticmethod
    def of(keys: PackedKeys, order: SampleOrder, num_threads: int, new_bytes: NewBytes) -> "SampleLayout":
        num_features, num_parts = len(keys.jagged), order.num_parts
        num_segments = num_features * sum(order.sizes)
        block_segments = np.concatenate([[0], np.cumsum(np.repeat(order.sizes, num_features))])
        if keys.is_one_each and num_parts == 1:
            bounds = shared_range(num_segments + 1)
            return SampleLayout(bounds, True, None, block_segments, block_segments, min(1, num_segments))
        memory = new_bytes(_INT64 * (num_segments + 1 + (num_segments if num_parts > 1 else 0))).view(torch.int64)
        bounds, sources = memory[: num_segments + 1], memory[num_segments + 1 :] if num_parts > 1 else None
        lists = feature_sample_lists(keys.group, keys.jagged)
        samples = order.samples, order.part_offsets, sum(order.sizes)
        longest = pack_ops.lay_out(lists, *samples, bounds, sources, num_threads)
        is_one_each = longest <= 1 and int(bounds[-1]) == num_segments
        return SampleLayout(bounds, is_one_each, sources, bounds.numpy()[block_segments], block_segments, longest)


@dataclass(frozen=True)
class PackedBatch:
    """A batch before its distinct keys are known."""

    features: FeatureGroups
    batch: Batch
    groups: list[PackedKeys]
    order: SampleOrder | None
    """Samples of each micro-batch; None if they depend on the distinct keys."""
    layouts: list[SampleLayout]
    """By group; empty if the order is not known."""
    num_micro_batches: int
    world_size: int
    num_threads: int
    clustering: Clustering
    has_batch: bool


def pack_batch(
    features: FeatureGroups,
    batch: Batch | None,
    num_micro_batches: int,
    world_size: int,
    num_threads: int,
    clustering: Clustering,
    new_bytes: NewBytes,
) -> PackedBatch:
    """Checks a batch and packs its keys. batch: None if this rank is out of data."""
    has_batch = batch is not None
    batch = checked_batch(features, batch)
    groups = [PackedKeys.from_batch(group, batch, num_threads, new_bytes) for group in features.groups]
    order, layouts = None, list[SampleLayout]()
    if clustering.keeps_order(num_micro_batches):
        order = SampleOrder.in_order(len(batch), num_micro_batches)
        layouts = [SampleLayout.of(group, order, num_threads, new_bytes) for group in groups]
    numbers = num_micro_batches, world_size, num_threads
    return PackedBatch(features, batch, groups, order, layouts, *numbers, clustering, has_batch)
