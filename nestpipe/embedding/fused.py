"""The occurrences of a group's features on a device, in the form in which one launch serves many features.

All pooled features of a group are pooled together, and all its sequences gathered together. The backward of such a set
of features needs the occurrences of each row. One sort by (micro-batch, set, row) brings them together, those of a row
in the order of the batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.group import FeatureSet, TableGroup
from nestpipe.embedding.micro_batch_rows import UsedRows
from nestpipe.embedding.packed import PackedKeys, SampleLayout
from nestpipe.embedding.table import Feature, Pooled
from nestpipe.kernels.keys.runs import Blocks, describe
from nestpipe.kernels.rows.pooling import DeviceOccurrences
from nestpipe.kernels.rows.segments import PIECE, Segments, make_pieces, one_each, sum_segments


@dataclass(frozen=True)
class GroupOccurrences:
    """The occurrences of all features of a group, on a device."""

    group: TableGroup
    sets: list[list[DeviceOccurrences]]
    """By micro-batch and set of features."""
    layout: SampleLayout
    rows: Tensor
    """[occurrences] row of each among the group's rows of its micro-batch; their number for padding."""
    bounds: Tensor
    """layout.bounds on the device."""
    row_counts: NDArray[np.int64]
    """[micro-batches, tables]"""

    def map(self, function: Callable[[Tensor], Tensor]) -> "GroupOccurrences":
        """Replaces every tensor on the device."""
        sets = [[occurrences.map(function) for occurrences in part] for part in self.sets]
        return replace(self, sets=sets, rows=function(self.rows), bounds=function(self.bounds))

    def block(self, micro_batch: int, feature: int) -> slice:
        """Returns the occurrences of a feature in a micro-batch."""
        first = micro_batch * len(self.group.features) + feature
        return slice(*self.layout.block_bounds[first : first + 2].tolist())

    def set_sizes(self, micro_batch: int, feature_set: FeatureSet) -> list[int]:
        """Returns the number of occurrences of each feature of a set."""
        blocks = [self.block(micro_batch, feature) for feature in feature_set.features]
        return [block.stop - block.start for block in blocks]

    def index(self, micro_batch: int, feature: int) -> Tensor:
        """Returns the row of each key of a feature among those of its table; their number for padding."""
        rows, table = self.rows[self.block(micro_batch, feature)], int(self.group.feature_tables[feature])
        counts = self.row_counts[micro_batch]
        if len(counts) == 1:
            return rows
        before, number = int(counts[:table].sum()), int(counts[table])
        return torch.where(rows < before + number, rows - before, number)

    def offsets(self, micro_batch: int, feature: int) -> Tensor:
        """Returns the start of each sample in `index`, [samples + 1]."""
        bounds = self.bounds[self._segments(micro_batch, feature)]
        return bounds.sub(self.block(micro_batch, feature).start)

    def host_offsets(self, micro_batch: int, feature: int) -> Tensor:
        """Returns `offsets` in host memory."""
        bounds = self.layout.bounds[self._segments(micro_batch, feature)]
        return bounds.sub(self.block(micro_batch, feature).start)

    def _segments(self, micro_batch: int, feature: int) -> slice:
        block = micro_batch * len(self.group.features) + feature
        first, end = self.layout.block_segments[block : block + 2].tolist()
        return slice(first, end + 1)


def group_occurrences(
    features: Mapping[str, Feature], packed: PackedKeys, layout: SampleLayout, used: UsedRows
) -> GroupOccurrences:
    """Arranges the occurrences of a group."""
    group, num_parts = packed.group, len(used.row_counts)
    weights = _weights(features, packed, layout, used)
    entries = None if group.frozen else _Entries.sort(group, layout, used)
    sets = [
        [_occurrences(s, p, entries, weights, group, layout, used) for s in range(len(group.feature_sets))]
        for p in range(num_parts)
    ]
    return GroupOccurrences(group, sets, layout, used.rows, used.bounds, used.row_counts)


@dataclass(frozen=True)
class _Entries:
    """All occurrences, sorted by (micro-batch, set, row). Padding comes after the rows of each set."""

    occurrences: Tensor
    vectors: Tensor
    """Vector of its set that each occurrence is part of."""
    offsets: Tensor
    """[micro-batches * sets * (rows + 1)] first entry of each row; used only up to the rows of the micro-batch."""
    most_rows: int

    @staticmethod
    def sort(group: TableGroup, layout: SampleLayout, used: UsedRows) -> "_Entries":
        num_parts, num_sets = len(used.row_counts), len(group.feature_sets)
        most_rows = int(used.row_counts.sum(1).max())
        blocks = _blocks(group, layout, num_parts, most_rows + 1, used.rows.device)
        sort_keys, vectors = describe(used.rows, used.segments, blocks)
        num_keys = num_parts * num_sets * (most_rows + 1)
        if num_keys < 2**31:
            sort_keys = sort_keys.to(torch.int32)  # sorted in half the time
        sorted_keys, occurrences = sort_keys.sort(stable=True)
        places = torch.arange(num_keys, dtype=sort_keys.dtype, device=sort_keys.device)
        offsets = torch.searchsorted(sorted_keys, places)
        return _Entries(occurrences, vectors.index_select(0, occurrences), offsets, most_rows)

    def rows(self, number: int, num_rows: int, num_entries: int, is_weighted: bool) -> Segments:
        """Returns the entries of each row. number: of the micro-batch and set."""
        first = number * (self.most_rows + 1)
        offsets = self.offsets[first : first + num_rows + 1]
        pieces = None
        if num_entries > PIECE and num_rows > 0:
            pieces = make_pieces(offsets[:-1], offsets[1:], num_entries)
        return Segments(num_rows, self.vectors, offsets, None, self.occurrences if is_weighted else None, pieces)


def _blocks(group: TableGroup, layout: SampleLayout, num_parts: int, per_set: int, device: torch.device) -> Blocks:
    """Describes the blocks: what they are sorted by, and the vectors of their occurrences."""
    num_features, num_sets = len(group.features), len(group.feature_sets)
    sizes = np.diff(layout.block_bounds).reshape(num_parts, num_features)
    numbers = np.zeros((5, num_parts * num_features + 1), dtype=np.int64)
    bounds, bases, per_segment, per_occurrence, shifts = numbers
    bounds[:] = layout.block_bounds
    parts = np.arange(num_parts)[:, None]
    for s, feature_set in enumerate(group.feature_sets):
        features = np.array(feature_set.features)
        blocks = parts * num_features + features
        bases[blocks] = (parts * num_sets + s) * per_set
        if feature_set.is_pooled:
            number = len(features)
            per_segment[blocks] = number
            shifts[blocks] = np.arange(number) - layout.block_segments[blocks] * number
        else:
            of_set = sizes[:, features]
            per_occurrence[blocks] = 1
            shifts[blocks] = np.cumsum(of_set, axis=1) - of_set - layout.block_bounds[blocks]
    on_device = torch.from_numpy(numbers).to(device, non_blocking=True)
    return Blocks(on_device[0], *on_device[1:, :-1])


def _occurrences(
    s: int,
    part: int,
    entries: _Entries | None,
    weights: Tensor | None,
    group: TableGroup,
    layout: SampleLayout,
    used: UsedRows,
) -> DeviceOccurrences:
    """Returns the occurrences of set s in a micro-batch."""
    feature_set = group.feature_sets[s]
    blocks = [part * len(group.features) + feature for feature in feature_set.features]
    num_entries = sum(int(layout.block_bounds[b + 1] - layout.block_bounds[b]) for b in blocks)
    if not feature_set.is_pooled:
        weights = None
        vectors = one_each(_joined(used.rows, [slice(*layout.block_bounds[b : b + 2].tolist()) for b in blocks]))
    else:
        vectors = _pooled_vectors(feature_set, part, group, layout, used, num_entries, weights is not None)
    if entries is None:
        return DeviceOccurrences(vectors, None, weights)
    number, num_rows = part * len(group.feature_sets) + s, int(used.row_counts[part].sum())
    return DeviceOccurrences(vectors, entries.rows(number, num_rows, num_entries, weights is not None), weights)


def _joined(array: Tensor, slices: list[slice]) -> Tensor:
    """Returns slices of an array, one after another; a view if they are adjacent."""
    if all(one.stop == other.start for one, other in pairwise(slices)):
        return array[slices[0].start : slices[-1].stop]
    return torch.cat([array[one] for one in slices])


def _pooled_vectors(
    feature_set: FeatureSet,
    part: int,
    group: TableGroup,
    layout: SampleLayout,
    used: UsedRows,
    num_entries: int,
    is_weighted: bool,
) -> Segments:
    """Returns the rows of vector sample * features + feature."""
    num_features, first_block = len(group.features), part * len(group.features)
    first, end = (int(layout.block_segments[first_block + number]) for number in (0, num_features))

    def by_sample(array: Tensor) -> Tensor:
        by_feature = array.view(num_features, (end - first) // num_features)
        if feature_set.features != tuple(range(num_features)):
            by_feature = torch.stack([by_feature[feature] for feature in feature_set.features])
        return by_feature.t().reshape(-1)

    if used.segments is None and not is_weighted:  # one key each: a gather
        return one_each(by_sample(used.rows[first:end]))
    starts, ends = by_sample(used.bounds[first:end]), by_sample(used.bounds[first + 1 : end + 1])
    has_long = layout.longest > PIECE and len(starts) > 0
    pieces = make_pieces(starts, ends, num_entries) if has_long else None
    return Segments(len(starts), used.rows, starts, ends, None, pieces)


def _weights(
    features: Mapping[str, Feature], packed: PackedKeys, layout: SampleLayout, used: UsedRows
) -> Tensor | None:
    """Returns the factor of each occurrence; None if all are 1. The factors of a mean add up to 1, padding has 0."""
    group, device = packed.group, used.rows.device
    pooled = [features[name] for name in group.features]
    is_mean = np.array([isinstance(feature, Pooled) and feature.mode == "mean" for feature in pooled])
    if packed.weights is None and not is_mean.any():
        return None
    if packed.weights is None:
        weights = torch.ones(len(used.rows), dtype=group.dtype, device=device)
    else:
        weights = packed.weights.to(device, non_blocking=True)
        weights = weights if used.sources is None else weights.index_select(0, used.sources)
    if not is_mean.any():
        return weights
    num_parts = len(used.row_counts)
    num_rows = used.row_counts.sum(1)
    part_bounds = layout.block_bounds[:: len(group.features)]
    limits = torch.repeat_interleave(
        torch.from_numpy(num_rows).to(device),
        torch.from_numpy(np.diff(part_bounds)).to(device),
        output_size=len(used.rows),
    )
    weights = weights * (used.rows < limits)
    num_segments = len(used.bounds) - 1
    totals = torch.empty(num_segments, 1, dtype=group.dtype, device=device)
    sum_segments(weights[:, None], Segments(num_segments, None, used.bounds), None, totals)  # one after another
    is_mean_segment = torch.repeat_interleave(
        torch.from_numpy(np.tile(is_mean, num_parts)).to(device),
        torch.from_numpy(np.diff(layout.block_segments)).to(device),
        output_size=num_segments,
    )
    divisors = torch.where(is_mean_segment & (totals[:, 0] != 0), totals[:, 0], 1.0)
    return weights / (divisors if used.segments is None else divisors.index_select(0, used.segments))
