"""Features that are pooled at the owners of their keys, as the requester sees them.

A bag is the keys of one sample in such a feature. Each owner adds up the rows of its part of a bag, weighted, and sends
the partial sum; the requester adds the partial sums of a bag in order of owner. The gradient of a partial sum goes back
to its owner. To the exchange, a partial sum is a row that one micro-batch uses.

Two orders matter. Messages to an owner have its parts of bags by (micro-batch, feature, sample). The partial sums of a
micro-batch lie by (feature, sample, owner), so that those of a bag are neighbours.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.embedding.group import FeatureGroups, TableGroup
from nestpipe.embedding.key_lists import SampleOrder, contiguous_keys, feature_key_lists, group_weights, outside_error
from nestpipe.embedding.pooling import Occurrences, pool
from nestpipe.embedding.table import Pooled
from nestpipe.embedding.travel import TravelList
from nestpipe.kernels.rows import pooling as on_device
from nestpipe.kernels.rows.segments import Segments, one_each
from nestpipe.store import group_by_row
from nestpipe.store.native import plan_ops


@dataclass(frozen=True)
class BagPart:
    """The bags of one micro-batch: those of feature after feature, sample after sample."""

    offsets: Tensor
    """[features * samples + 1] first partial sum of each bag."""
    factors: Tensor | None
    """[partial sums] factor of each, which divides a mean by its weights; None if all are 1."""
    bag_of: Tensor
    """[partial sums] bag of each."""
    num_features: int
    num_samples: int

    def map(self, function: Callable[[Tensor], Tensor]) -> "BagPart":
        factors = None if self.factors is None else function(self.factors)
        return replace(self, offsets=function(self.offsets), factors=factors, bag_of=function(self.bag_of))

    def pool(self, sums: Tensor) -> tuple[Tensor, ...]:
        """Returns [samples, dim] for each feature. sums: the partial sums of the micro-batch."""
        if not sums.is_cpu:
            return on_device.gather(self.device_occurrences, sums, [self.num_samples] * self.num_features)
        pooled = pool([Occurrences(torch.arange(len(sums)), self.offsets, self.factors)], [sums])
        return pooled.view(self.num_features, self.num_samples, sums.shape[1]).unbind()

    @property
    def device_occurrences(self) -> on_device.DeviceOccurrences:
        vectors = Segments(len(self.offsets) - 1, None, self.offsets)
        return on_device.DeviceOccurrences(vectors, one_each(self.bag_of), self.factors)


@dataclass(frozen=True)
class Bags:
    """The bags of one table group in a batch, on the rank whose samples they are."""

    group: TableGroup
    """The tables of the group, with the features that are pooled at the owner."""
    keys: Tensor
    """Distinct keys by (owner, table, first use)."""
    counts: Tensor
    """[ranks, tables] int32: distinct keys of each table that each rank owns."""
    lengths: Tensor
    """[partial sums] int32: keys of each, by (owner, micro-batch, feature, sample)."""
    numbers: Tensor
    """[occurrences] int32, in the same order: which of its owner's keys each one is."""
    weights: Tensor | None
    """[occurrences] of the tables' dtype; None if no feature has weights."""
    sum_counts: NDArray[np.int64]
    """[ranks, micro-batches] partial sums."""
    occurrence_counts: NDArray[np.int64]
    """[ranks] occurrences."""
    rows: Tensor
    """[partial sums] place of each among those of its micro-batch, in the order of `lengths`."""
    parts: list[BagPart]
    """By micro-batch."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Bags":
        """Replaces every tensor in the memory of the rows."""
        return replace(self, parts=[part.map(function) for part in self.parts])

    def num_rows(self, micro_batch: int) -> int:
        """Returns the number of partial sums of a micro-batch."""
        return int(self.sum_counts[:, micro_batch].sum())

    def travel_list(self, rank: int) -> TravelList:
        """Lists the partial sums that arrive with each micro-batch, and whose gradients leave with it."""
        starts = np.concatenate([[0], np.cumsum(self.sum_counts)])[:-1].reshape(self.sum_counts.shape)
        return grouped_list(self.rows, starts, self.sum_counts, rank)


def grouped_list(places: Tensor, starts: NDArray[np.int64], counts: NDArray[np.int64], rank: int) -> TravelList:
    """Returns a travel list of places that lie in blocks. starts, counts: [ranks, parts] of the blocks."""
    num_ranks, num_parts = counts.shape
    ranks, parts = np.repeat(np.arange(num_ranks), num_parts), np.tile(np.arange(num_parts), num_ranks)
    order = np.lexsort((ranks, ranks == rank, parts))  # by part: other ranks, then this one
    sizes = counts.ravel()[order]
    shifts = starts.ravel()[order] - (np.cumsum(sizes) - sizes)
    taken = torch.from_numpy(np.repeat(shifts, sizes) + np.arange(int(sizes.sum())))
    others = counts.copy()
    others[rank] = 0
    steps = np.stack([others.sum(0), counts[rank]], axis=1).ravel().tolist()
    return TravelList(places.index_select(0, taken), [0, *accumulate(steps)], np.ascontiguousarray(others.T))


def split_bags(
    features: FeatureGroups, batch: Batch, order: SampleOrder, world_size: int, num_threads: int
) -> list[Bags]:
    """Splits the bags of a batch into the parts that each owner adds up."""
    groups = [bags for g in features.bag_groups if (bags := features.groups[g].bags) is not None]
    return [_split(features, group, batch, order, world_size, num_threads) for group in groups]


def _split(
    features: FeatureGroups, group: TableGroup, batch: Batch, order: SampleOrder, world_size: int, num_threads: int
) -> Bags:
    jagged = contiguous_keys(group, batch)
    deduped = plan_ops.dedup(feature_key_lists(group, jagged), group.salts, world_size, num_threads)
    if deduped.outside is not None:
        raise outside_error(group, jagged, *deduped.outside)
    is_weighted = any(lists.weights is not None for lists in jagged)
    weights = group_weights(group, jagged) if is_weighted else None
    lengths = torch.cat([lists.lengths for lists in jagged])
    layout = _BagLayout(order, len(jagged), world_size)
    bags = torch.repeat_interleave(layout.bag_of_sample.flatten(), lengths)
    positions = deduped.positions
    if any(features.features[name].padding_key is not None for name in group.features):
        present = ((positions >= 0) & (positions < len(deduped.keys))).nonzero().flatten()
        positions, bags = positions[present], bags[present]
        weights = None if weights is None else weights[present]
    is_mean = [isinstance(f := features.features[name], Pooled) and f.mode == "mean" for name in group.features]
    factors = _mean_factors(layout, is_mean, bags, weights, group.dtype) if any(is_mean) else None
    num_owned = deduped.counts.sum(1)
    owner_of = torch.repeat_interleave(torch.arange(world_size), num_owned)
    number_of = torch.arange(len(deduped.keys)) - (num_owned.cumsum(0) - num_owned)[owner_of]
    owners = owner_of.index_select(0, positions)
    order_of_message = _order(owners, world_size, _order(bags, layout.num_bags))
    ids = (owners * layout.num_bags + bags).index_select(0, order_of_message)
    sums, lengths = torch.unique_consecutive(ids, return_counts=True)
    rows, row_bags = layout.rows(sums)
    return Bags(
        group=group,
        keys=deduped.keys,
        counts=deduped.counts,
        lengths=lengths.int(),
        numbers=number_of.int().index_select(0, positions.index_select(0, order_of_message)),
        weights=None if weights is None else weights.index_select(0, order_of_message),
        sum_counts=layout.sum_counts(sums),
        occurrence_counts=torch.bincount(owners, minlength=world_size).numpy(),
        rows=rows,
        parts=layout.parts(row_bags, factors),
    )


def _order(numbers: Tensor, most: int, order: Tensor | None = None) -> Tensor:
    """Returns a stable order of numbers below `most`, which counts them instead of comparing them. order: to begin
    with; None for that of the list."""
    ordered = numbers if order is None else numbers.index_select(0, order)
    _, _, by_number = group_by_row(ordered, None, most, with_occurrences=False)
    return by_number if order is None else order.index_select(0, by_number)


class _BagLayout:
    """Numbers of the bags of a group: by (micro-batch, feature, sample)."""

    def __init__(self, order: SampleOrder, num_features: int, world_size: int) -> None:
        self._num_features, self._world_size = num_features, world_size
        self._sizes = order.sizes
        sizes = torch.tensor(order.sizes)
        num_samples, num_parts = sum(order.sizes), len(order.sizes)
        self._num_samples, self._num_parts = num_samples, num_parts
        parts = torch.repeat_interleave(torch.arange(num_parts), sizes)
        starts = order.part_offsets[:-1]
        within = torch.arange(num_samples) - starts[parts]
        features = torch.arange(num_features)[:, None]
        bags = (num_features * starts)[parts] + features * sizes[parts] + within
        if order.samples is not None:
            by_sample = torch.empty_like(bags)
            by_sample[:, order.samples] = bags
            bags = by_sample
        self.bag_of_sample = bags
        """[features, samples] bag of each, samples in the order of the batch."""
        self._bag_starts = (num_features * order.part_offsets).contiguous()
        """[micro-batches + 1] first bag of each."""

    @property
    def num_bags(self) -> int:
        return self._num_features * self._num_samples

    def sum_counts(self, ids: Tensor) -> NDArray[np.int64]:
        """Returns the partial sums of each owner and micro-batch. ids: owner * num_bags + bag of each."""
        starts = torch.arange(self._world_size)[:, None] * self.num_bags + self._bag_starts
        return torch.searchsorted(ids, starts).diff(dim=1).numpy()

    def rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the place of each partial sum among those of its micro-batch, and the bags by place."""
        bags = ids % max(1, self.num_bags)
        order = _order(bags, self.num_bags)  # stable: owners in order
        by_place = bags.index_select(0, order)
        starts = torch.searchsorted(by_place, self._bag_starts)
        shifts = torch.repeat_interleave(starts[:-1], starts.diff())
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order)) - shifts
        return rows, by_place

    def parts(self, row_bags: Tensor, factors: Tensor | None) -> list[BagPart]:
        """row_bags: bag of each partial sum, micro-batch after micro-batch. factors: of each bag."""
        offsets = torch.zeros(self.num_bags + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(row_bags, minlength=self.num_bags), 0, out=offsets[1:])
        made = []
        for part, size in enumerate(self._sizes):
            first, end = self._bag_starts[part : part + 2].tolist()
            bounds = offsets[first : end + 1]
            bags = row_bags[int(bounds[0]) : int(bounds[-1])]
            part_factors = None if factors is None else factors[bags]
            made.append(BagPart(bounds - bounds[0], part_factors, bags - first, self._num_features, size))
        return made

    def is_mean(self, features: list[bool]) -> Tensor:
        """Returns for each bag whether its feature is one of some."""
        result = torch.empty(self.num_bags, dtype=torch.bool)
        result[self.bag_of_sample] = torch.tensor(features)[:, None].expand_as(self.bag_of_sample)
        return result


def _mean_factors(
    layout: _BagLayout, is_mean: list[bool], bags: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns the factor of each bag: for a mean 1 divided by the sum of its weights, otherwise 1."""
    means = layout.is_mean(is_mean)
    totals = torch.zeros(len(means), dtype=dtype)
    totals.index_add_(0, bags, torch.ones(len(bags), dtype=dtype) if weights is None else weights)
    return torch.where(means & (totals != 0), 1 / totals, 1.0)
