"""The plan of a batch: the rows and gradients that travel with each of its micro-batches.

Requester and owner derive the same plan from the bits that say which micro-batches use a key. In window "once" a row
travels with the first micro-batch that uses it, and its gradient with the last one. In window "resend" both travel with
every micro-batch that uses the row. All lists hold indices, so that they can be mapped from keys to rows or slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.device.transfer import ALIGNMENT
from nestpipe.embedding.dedup import RequesterDedup
from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.route import OwnerDedup, Route
from nestpipe.kernels.rows.segments import Segments, make_segments
from nestpipe.store import group_by_row
from nestpipe.store.native import plan_ops

WINDOWS = ("once", "resend")


@dataclass(frozen=True)
class TravelList:
    """The keys that travel with each micro-batch, and how many go to, or come from, each rank."""

    places: Tensor
    """Indices of the keys, micro-batch after micro-batch: those of other ranks ascending, then this rank's own."""
    bounds: list[int]
    """[2 * micro-batches + 1] start of each part of `places`."""
    counts: NDArray[np.int64]
    """[micro-batches, ranks] keys of each other rank; 0 for this rank."""
    message_places: Tensor | None = None
    """Place of each row of other ranks in its message, in units, micro-batch after micro-batch; None if contiguous."""
    message_bounds: tuple[int, ...] = ()
    """[micro-batches + 1] start of each part of message_places."""

    def others(self, micro_batch: int) -> Tensor:
        return self.places[self.bounds[2 * micro_batch] : self.bounds[2 * micro_batch + 1]]

    def own(self, micro_batch: int) -> Tensor:
        return self.places[self.bounds[2 * micro_batch + 1] : self.bounds[2 * micro_batch + 2]]

    def in_message(self, micro_batch: int) -> Tensor | None:
        if self.message_places is None:
            return None
        return self.message_places[self.message_bounds[micro_batch] : self.message_bounds[micro_batch + 1]]

    def num_others(self, micro_batch: int) -> int:
        return self.bounds[2 * micro_batch + 1] - self.bounds[2 * micro_batch]

    def num_own(self, micro_batch: int) -> int:
        return self.bounds[2 * micro_batch + 2] - self.bounds[2 * micro_batch + 1]

    def select(self, numbers: Tensor) -> "TravelList":
        """Replaces each place by its entry in `numbers`."""
        return replace(self, places=numbers.index_select(0, self.places))

    def map(self, function: Callable[[Tensor], Tensor]) -> "TravelList":
        in_message = None if self.message_places is None else function(self.message_places)
        return replace(self, places=function(self.places), message_places=in_message)


@dataclass(frozen=True)
class MessageSizes:
    """Sizes of the messages of one direction. A message has the rows of rank after rank, and for each rank those of
    group after group, each starting at a multiple of 16 bytes. A rank sends no message to itself."""

    sizes: list[list[int]]
    """[micro-batches][ranks] bytes."""
    row_bytes: list[int]
    """[micro-batches] bytes of rows alone."""
    num_bytes: list[int]
    """[micro-batches] bytes of the whole message."""


@dataclass(frozen=True)
class GroupPlan:
    """The plan of one table group: what this rank sends and receives in both exchanges, as requester and as owner."""

    group: TableGroup
    rows_in: TravelList
    """Requester: positions whose rows arrive; with one micro-batch, its rows."""
    rows_out: TravelList
    """Owner: indices of the owned keys whose rows are sent."""
    gradients_out: TravelList
    """Requester: positions whose gradients are sent; with one micro-batch, its rows."""
    gradients_in: TravelList
    """Owner: entries whose gradients arrive."""
    num_entries: int
    sums: Segments
    """Entries of each owned key, in order of requester."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "GroupPlan":
        return replace(
            self,
            rows_in=self.rows_in.map(function),
            rows_out=self.rows_out.map(function),
            gradients_out=self.gradients_out.map(function),
            gradients_in=self.gradients_in.map(function),
            sums=self.sums.map(function),
        )


@dataclass(frozen=True)
class Plan:
    """The plan of all groups of a batch."""

    window: str
    groups: list[GroupPlan]
    rows_in: MessageSizes
    rows_out: MessageSizes
    gradients_in: MessageSizes
    gradients_out: MessageSizes

    def map(self, function: Callable[[Tensor], Tensor]) -> "Plan":
        return replace(self, groups=[group.map(function) for group in self.groups])


def make_plan(route: Route, window: str, rank: int, message_row_bytes: Callable[[TableGroup], int]) -> Plan:
    """Plans the exchanges of a batch among several ranks. message_row_bytes: size of a row in a message."""
    num_parts = route.batch.num_micro_batches
    pairs = list(zip(route.batch.groups, route.owner_dedups, strict=True))
    groups = [_group_plan(dedup, owner, num_parts, window, rank) for dedup, owner in pairs]
    row_bytes = [message_row_bytes(group.group) for group in groups]
    rows_in, lists_a = _lay_out([group.rows_in for group in groups], row_bytes)
    rows_out, lists_b = _lay_out([group.rows_out for group in groups], row_bytes)
    gradients_in, lists_c = _lay_out([group.gradients_in for group in groups], row_bytes)
    gradients_out, lists_d = _lay_out([group.gradients_out for group in groups], row_bytes)
    for g, (a, b, c, d) in enumerate(zip(lists_a, lists_b, lists_c, lists_d, strict=True)):
        groups[g] = replace(groups[g], rows_in=a, rows_out=b, gradients_in=c, gradients_out=d)
    return Plan(window, groups, rows_in, rows_out, gradients_in, gradients_out)


def requester_lists(dedup: RequesterDedup, window: str, rank: int) -> tuple[TravelList, TravelList]:
    """Returns the positions whose rows arrive with each micro-batch, and those whose gradients leave with it."""
    counts = dedup.counts.numpy().sum(axis=1, dtype=np.int64)
    return _lists(dedup.group, dedup.uses, len(dedup.num_samples), window, counts, rank)


def _lists(
    group: TableGroup, uses: Tensor, num_parts: int, window: str, counts: NDArray[np.int64], rank: int
) -> tuple[TravelList, TravelList]:
    """Returns the lists of the way out and of the way back, for keys of which each rank has counts[rank]."""

    def listed(which: str) -> TravelList:
        places, bounds, per_rank = plan_ops.exchange_lists(uses, num_parts, which, torch.from_numpy(counts), rank)
        return TravelList(places, bounds.tolist(), per_rank.numpy())

    first, last = ("all", "all") if window == "resend" else ("first", "last")
    if not group.frozen:
        return listed(first), listed(last)
    none = TravelList(
        torch.empty(0, dtype=torch.int64),
        [0] * (2 * num_parts + 1),
        np.zeros((num_parts, len(counts)), dtype=np.int64),
    )
    return listed(first), none


def _group_plan(dedup: RequesterDedup, owner: OwnerDedup, num_parts: int, window: str, rank: int) -> GroupPlan:
    rows_in, gradients_out = requester_lists(dedup, window, rank)
    if num_parts == 1 and len(dedup.group.tables) > 1:
        rows = _rows_of_positions(dedup.counts.numpy())
        rows_in, gradients_out = rows_in.select(rows), gradients_out.select(rows)
    entries_out, gradients_in = _lists(owner.group, owner.uses, num_parts, window, owner.entry_counts, rank)
    order, offsets = _entries_by_key(owner)
    return GroupPlan(
        group=dedup.group,
        rows_in=rows_in,
        rows_out=entries_out.select(owner.key_index),
        gradients_out=gradients_out,
        gradients_in=gradients_in,
        num_entries=len(owner.key_index),
        sums=make_segments(order, offsets),
    )


def _rows_of_positions(counts: NDArray[np.int32]) -> Tensor:
    """Returns the row of each position if there is one micro-batch: rows are ordered by table, then by owner.

    counts: [ranks, tables] positions, which are ordered by owner, then by table.
    """
    by_table = np.cumsum(counts.T.ravel(), dtype=np.int64).reshape(counts.T.shape).T - counts
    by_owner = np.cumsum(counts.ravel(), dtype=np.int64) - counts.ravel()
    shifts = by_table.ravel() - by_owner
    return torch.from_numpy(np.repeat(shifts, counts.ravel()) + np.arange(int(counts.sum())))


def _entries_by_key(dedup: OwnerDedup) -> tuple[Tensor, Tensor]:
    offsets, _, entries = group_by_row(dedup.key_index, None, len(dedup.keys), with_occurrences=False)
    return entries, offsets


def _lay_out(lists: list[TravelList], row_bytes: list[int]) -> tuple[MessageSizes, list[TravelList]]:
    """Lays out the messages of one direction, of all micro-batches and ranks at once."""
    used = [travel.counts * width for travel, width in zip(lists, row_bytes, strict=True)]
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in used]
    sizes = np.sum(padded, axis=0)
    starts = np.cumsum(sizes, axis=1) - sizes
    laid_out = []
    for travel, width, size in zip(lists, row_bytes, padded, strict=True):
        laid_out.append(_with_message_places(travel, starts, width))
        starts = starts + size
    totals = np.sum(used, axis=(0, 2)).tolist(), sizes.sum(axis=1).tolist()
    return MessageSizes(sizes.tolist(), *totals), laid_out


def message_unit(row_bytes: int) -> int:
    """Returns the unit of places in a message, in bytes: every row begins at a multiple of it."""
    return gcd(row_bytes, ALIGNMENT)


def _with_message_places(travel: TravelList, starts: NDArray[np.int64], row_bytes: int) -> TravelList:
    """Sets the places of rows in the message. starts: [micro-batches, ranks] bytes at which the group's rows begin."""
    counts = travel.counts
    totals = counts.sum(axis=1)
    bounds = np.concatenate([[0], np.cumsum(totals)])
    flat = counts.ravel()
    before = np.cumsum(counts, axis=1) - counts
    if np.array_equal(starts[counts > 0], (before * row_bytes)[counts > 0]):
        return replace(travel, message_places=None)  # one group without gaps: rows are contiguous
    shift = starts.ravel() - (np.cumsum(flat) - flat) * row_bytes
    places = np.repeat(shift, flat) + np.arange(int(bounds[-1])) * row_bytes
    in_message = torch.from_numpy(places // message_unit(row_bytes))
    return replace(travel, message_places=in_message, message_bounds=tuple(bounds.tolist()))
