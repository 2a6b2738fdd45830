"""Features that are pooled at the owners of their keys, as an owner sees them.

Requesters tell each owner their keys, and which of them each partial sum adds up. An owner numbers the partial sums
that it sends by (micro-batch, requester, feature, sample). It adds the gradients that come back for a key in the order
(requester, micro-batch, feature, sample).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.distributed import Channel
from nestpipe.embedding.bags import Bags, grouped_list
from nestpipe.embedding.travel import TravelList
from nestpipe.kernels.rows.segments import Segments, make_segments
from nestpipe.store import group_by_row
from nestpipe.store.native import plan_ops

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class ReceivedBags:
    """The bags of one group that requesters ask an owner for, requester after requester. See Bags."""

    keys: Tensor
    counts: Tensor
    """[requesters, tables] int32 keys."""
    lengths: Tensor
    numbers: Tensor
    """For each occurrence, the number of its key among the keys that its requester has sent."""
    weights: Tensor | None
    """None if no requester has weights."""
    sum_counts: Counts
    """[requesters, micro-batches] partial sums."""
    occurrence_counts: Counts
    """[requesters]"""


@dataclass(frozen=True)
class OwnedBags:
    """What an owner adds up for one group of a global batch."""

    keys: Tensor
    """Indices of the owned keys that bags use, ascending."""
    sums: list[Segments]
    """By micro-batch: the keys of each partial sum, as numbers in `keys`."""
    weights: list[Tensor | None]
    """By micro-batch: weight of each of them; None if all are 1."""
    gradients: Segments
    """The partial sums of each key."""
    gradient_weights: Tensor | None
    """Weight of each of them."""
    sum_counts: Counts
    """[requesters, micro-batches] partial sums."""

    @property
    def num_sums(self) -> int:
        return int(self.sum_counts.sum())

    def sums_of(self, micro_batch: int) -> slice:
        """Returns the numbers of the partial sums of a micro-batch."""
        ends = np.cumsum(self.sum_counts.sum(0))
        return slice(int(ends[micro_batch] - self.sum_counts[:, micro_batch].sum()), int(ends[micro_batch]))

    def travel_list(self, rank: int) -> TravelList:
        """Lists the partial sums that are sent with each micro-batch, and whose gradients arrive with it."""
        by_part = self.sum_counts.T
        starts = (np.cumsum(by_part) - by_part.ravel()).reshape(by_part.shape).T
        return grouped_list(torch.arange(self.num_sums), starts, self.sum_counts, rank)

    def map(self, function: Callable[[Tensor], Tensor]) -> "OwnedBags":
        return replace(
            self,
            keys=function(self.keys),
            sums=[segments.map(function) for segments in self.sums],
            weights=[None if weights is None else function(weights) for weights in self.weights],
            gradients=self.gradients.map(function),
            gradient_weights=None if self.gradient_weights is None else function(self.gradient_weights),
        )


def exchange_bags(bags: list[Bags], channel: Channel) -> tuple[list[ReceivedBags], int]:
    """Tells each owner its parts of bags. Returns those that this rank owns, and the bytes sent to other ranks."""
    if not bags:
        return [], 0
    sent_counts = torch.cat([_counts_of(group) for group in bags], dim=1)
    received = channel.all_to_all_equal(sent_counts)
    widths = [group.counts.shape[1] + group.sum_counts.shape[1] + 2 for group in bags]
    sent = [_Arrays.of(group) for group in bags]
    arriving = [_Arrays.empty(group, part) for group, part in zip(bags, received.split(widths, dim=1), strict=True)]
    outgoing, incoming = _message_layout(sent), _message_layout(arriving)
    message = torch.empty(sum(outgoing.sizes), dtype=torch.uint8)
    target = torch.empty(sum(incoming.sizes), dtype=torch.uint8)
    outgoing.write(message)
    channel.all_to_all(message, outgoing.sizes, target, incoming.sizes)
    incoming.read(target)
    num_bytes = len(message) - outgoing.sizes[channel.rank] + (channel.size - 1) * sent_counts[0].nbytes
    return [arrays.received() for arrays in arriving], num_bytes


def _counts_of(bags: Bags) -> Tensor:
    """Returns by owner, [ranks, columns] int32: keys of each table, partial sums of each micro-batch, occurrences, and
    whether there are weights."""
    columns = [
        bags.counts,
        torch.from_numpy(bags.sum_counts).int(),
        torch.from_numpy(bags.occurrence_counts).int()[:, None],
        torch.full((len(bags.counts), 1), int(bags.weights is not None), dtype=torch.int32),
    ]
    return torch.cat(columns, dim=1)


@dataclass(frozen=True)
class _Arrays:
    """The arrays of a group that travel in one message, and how many elements each rank has of each."""

    counts: Tensor
    sum_counts: Counts
    occurrence_counts: Counts
    arrays: tuple[Tensor, ...]
    """Keys, lengths, numbers, and weights."""
    num_elements: tuple[Counts, ...]
    """[ranks] of each array."""

    @staticmethod
    def of(bags: Bags) -> "_Arrays":
        has_weights = np.full(len(bags.counts), bags.weights is not None)
        weights = torch.empty(0, dtype=bags.group.dtype) if bags.weights is None else bags.weights
        arrays = bags.keys, bags.lengths, bags.numbers, weights
        return _Arrays._made(bags.counts, bags.sum_counts, bags.occurrence_counts, has_weights, arrays)

    @staticmethod
    def empty(bags: Bags, columns: Tensor) -> "_Arrays":
        """Returns arrays for what arrives. columns: _counts_of of each requester."""
        num_tables, num_parts = bags.counts.shape[1], bags.sum_counts.shape[1]
        counts, sums, occurrences, has_weights = columns.split([num_tables, num_parts, 1, 1], dim=1)
        numbers = sums.long().numpy(), occurrences[:, 0].long().numpy(), has_weights[:, 0].numpy() > 0
        made = _Arrays._made(counts.contiguous(), *numbers, ())
        dtypes = torch.int64, torch.int32, torch.int32, bags.group.dtype
        sizes = [int(number.sum()) for number in made.num_elements]
        arrays = tuple(torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True))
        return replace(made, arrays=arrays)

    @staticmethod
    def _made(
        counts: Tensor, sums: Counts, occurrences: Counts, has_weights: NDArray[np.bool_], arrays: tuple[Tensor, ...]
    ) -> "_Arrays":
        keys = counts.sum(1).numpy().astype(np.int64)
        elements = keys, sums.sum(1), occurrences, np.where(has_weights, occurrences, 0)
        return _Arrays(counts, sums, occurrences, arrays, elements)

    def received(self) -> ReceivedBags:
        keys, lengths, numbers, weights = self.arrays
        is_weighted = len(weights) > 0
        if is_weighted and len(weights) < len(numbers):  # some requesters have none: theirs are 1
            some, weights = weights, torch.ones(len(numbers), dtype=weights.dtype)
            size, (counts, given) = weights.itemsize, (self.occurrence_counts, self.num_elements[3])
            starts = (np.cumsum(given) - given) * size, (np.cumsum(counts) - counts) * size
            plan_ops.copy_runs(some, starts[0], weights, starts[1], given * size)
        sums = self.sum_counts, self.occurrence_counts
        return ReceivedBags(keys, self.counts, lengths, numbers, weights if is_weighted else None, *sums)


@dataclass(frozen=True)
class _MessageLayout:
    """Rank after rank, and for each rank, array after array."""

    arrays: list[Tensor]
    firsts: list[Counts]
    """[ranks] first byte of each rank's part of each array."""
    starts: list[Counts]
    """[ranks] first byte of it in the message."""
    lengths: list[Counts]
    """[ranks] its bytes."""
    sizes: list[int]
    """[ranks] bytes of the message."""

    def write(self, message: Tensor) -> None:
        for array, firsts, starts, lengths in zip(self.arrays, self.firsts, self.starts, self.lengths, strict=True):
            plan_ops.copy_runs(array, firsts, message, starts, lengths)

    def read(self, message: Tensor) -> None:
        for array, firsts, starts, lengths in zip(self.arrays, self.firsts, self.starts, self.lengths, strict=True):
            plan_ops.copy_runs(message, starts, array, firsts, lengths)


def _message_layout(groups: list[_Arrays]) -> _MessageLayout:
    arrays = [array for group in groups for array in group.arrays]
    elements = [number for group in groups for number in group.num_elements]
    lengths = [number * array.itemsize for array, number in zip(arrays, elements, strict=True)]
    sizes = np.sum(lengths, axis=0)
    starts = list(np.cumsum(sizes) - sizes + np.cumsum(lengths, axis=0) - lengths)
    return _MessageLayout(arrays, [np.cumsum(n) - n for n in lengths], starts, lengths, sizes.tolist())


def own_bags(received: ReceivedBags, key_index: Tensor, num_keys: int) -> OwnedBags:
    """Plans what an owner adds up. key_index: index of each of `received.keys` among the `num_keys` owned keys."""
    key_counts = received.counts.sum(1).numpy().astype(np.int64)
    shifts = np.repeat(np.cumsum(key_counts) - key_counts, received.occurrence_counts)
    keys = key_index.index_select(0, received.numbers + torch.from_numpy(shifts))
    lengths, blocks = received.lengths.long(), _Blocks.of(received)
    sum_of = torch.repeat_interleave(blocks.new_numbers(), lengths)
    offsets, _, order = group_by_row(keys, None, num_keys, with_occurrences=False)
    used = (offsets.diff() > 0).nonzero().flatten()
    numbers = torch.empty(num_keys, dtype=torch.int64)
    numbers[used] = torch.arange(len(used))
    weights = received.weights
    by_part = [blocks.by_part(array) for array in (numbers[keys], weights) if array is not None]
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(blocks.sums_by_part(lengths), 0, out=bounds[1:])
    sums, part_weights = [], []
    for first, end in pairwise([0, *accumulate(received.sum_counts.sum(0).tolist())]):
        inside = slice(int(bounds[first]), int(bounds[end]))
        sums.append(make_segments(by_part[0][inside], bounds[first : end + 1] - bounds[first]))
        part_weights.append(None if weights is None else by_part[1][inside])
    return OwnedBags(
        keys=used,
        sums=sums,
        weights=part_weights,
        gradients=make_segments(sum_of[order], torch.cat([offsets[used], offsets[-1:]])),
        gradient_weights=None if weights is None else weights[order],
        sum_counts=received.sum_counts,
    )


@dataclass(frozen=True)
class _Blocks:
    """The partial sums of each requester and micro-batch, which arrive requester after requester."""

    sums: Counts
    """[requesters, micro-batches] partial sums."""
    occurrences: Counts
    """[requesters, micro-batches] their keys."""

    @staticmethod
    def of(received: ReceivedBags) -> "_Blocks":
        ends = torch.zeros(len(received.lengths) + 1, dtype=torch.int64)
        torch.cumsum(received.lengths, 0, out=ends[1:])
        bounds = np.concatenate([[0], np.cumsum(received.sum_counts)])
        return _Blocks(received.sum_counts, np.diff(ends.numpy()[bounds]).reshape(received.sum_counts.shape))

    def new_numbers(self) -> Tensor:
        """Returns the number of each partial sum by (micro-batch, requester)."""
        shifts = _starts_by_part(self.sums) - (np.cumsum(self.sums) - self.sums.ravel())
        return torch.from_numpy(np.repeat(shifts, self.sums.ravel()) + np.arange(int(self.sums.sum())))

    def by_part(self, array: Tensor) -> Tensor:
        """Returns a value of each occurrence by (micro-batch, requester)."""
        return _moved(array, self.occurrences)

    def sums_by_part(self, array: Tensor) -> Tensor:
        """Returns a value of each partial sum by (micro-batch, requester)."""
        return _moved(array, self.sums)


def _starts_by_part(counts: Counts) -> Counts:
    """Returns the start of each block by (micro-batch, requester), for [requesters, micro-batches] counts, flat."""
    by_part = counts.T
    starts: Counts = (np.cumsum(by_part) - by_part.ravel()).reshape(by_part.shape).T.ravel()
    return starts


def _moved(array: Tensor, counts: Counts) -> Tensor:
    if counts.shape[1] == 1:
        return array
    target, size = torch.empty_like(array), array.itemsize
    firsts = np.cumsum(counts) - counts.ravel()
    plan_ops.copy_runs(array, firsts * size, target, _starts_by_part(counts) * size, counts.ravel() * size)
    return target
