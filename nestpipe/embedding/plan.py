"""The plan of a batch: the rows and gradients that travel with each of its parts.

A part is a micro-batch. In window "once" a row travels with the first micro-batch that uses it, and its gradient with
the last one. In window "resend" both travel with every micro-batch that uses the row. Exchange across batches (see
crossing.py) adds two parts: early rows, which travel before the first micro-batch, and late gradients, which travel
after the last one. For a key that is marked they take the place of its first, or last, micro-batch.

Requester and owner derive the same plan from the bits that say which micro-batches use a key. All lists hold indices,
so that they can be mapped from keys to rows or slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.dedup import RequesterDedup
from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.owned_bags import OwnedBags
from nestpipe.embedding.part_bits import with_early_part, with_late_part
from nestpipe.embedding.replica import Replica, by_table
from nestpipe.embedding.route import OwnerDedup, Route
from nestpipe.embedding.travel import MessageSizes, TravelList, lay_out
from nestpipe.kernels.rows.segments import Segments, make_segments
from nestpipe.store import group_by_row
from nestpipe.store.native import plan_ops

WINDOWS = ("once", "resend")


@dataclass(frozen=True)
class GroupSends:
    """The rows of one table group: what this rank receives as requester and sends as owner."""

    group: TableGroup
    rows_in: TravelList
    """Requester: positions whose rows arrive; with one micro-batch, its rows."""
    rows_out: TravelList
    """Owner: indices of the owned keys whose rows are sent."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "GroupSends":
        return replace(self, rows_in=self.rows_in.map(function), rows_out=self.rows_out.map(function))


@dataclass(frozen=True)
class Sends:
    """The rows of a batch, from owners to requesters."""

    groups: list[GroupSends]
    """Of rows, by table group; then of partial sums, by group with features that are pooled at the owner."""
    rows_in: MessageSizes
    rows_out: MessageSizes
    num_early: int
    """1 if part 0 has early rows, so that micro-batch i is part i + 1; otherwise 0."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Sends":
        return replace(self, groups=[group.map(function) for group in self.groups])


@dataclass(frozen=True)
class KeySums:
    """The gradients of owned keys: which keys, and the entries that are added for each."""

    keys: Tensor | None
    """Indices of the owned keys, ascending; None for all."""
    entries: Segments
    """Entries of each key, in order of requester."""
    weights: Tensor | None = None
    """Weight of each entry; None if all are 1."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "KeySums":
        keys, weights = (None if array is None else function(array) for array in (self.keys, self.weights))
        return KeySums(keys, self.entries.map(function), weights)


@dataclass(frozen=True)
class GroupReturns:
    """The gradients of one table group: what this rank sends as requester and receives as owner."""

    group: TableGroup
    gradients_out: TravelList
    """Requester: positions whose gradients are sent; with one micro-batch, its rows."""
    gradients_in: TravelList
    """Owner: entries whose gradients arrive."""
    num_entries: int
    sums: KeySums
    """Keys that are updated at the end of the batch."""
    late_sums: KeySums | None
    """Keys that are updated during the next batch; None if the group has no late gradients."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "GroupReturns":
        return replace(
            self,
            gradients_out=self.gradients_out.map(function),
            gradients_in=self.gradients_in.map(function),
            sums=self.sums.map(function),
            late_sums=None if self.late_sums is None else self.late_sums.map(function),
        )


@dataclass(frozen=True)
class Returns:
    """The gradients of a batch, from requesters to owners. Late gradients are the part after the last micro-batch."""

    groups: list[GroupReturns]
    gradients_in: MessageSizes
    gradients_out: MessageSizes
    has_late: bool

    def map(self, function: Callable[[Tensor], Tensor]) -> "Returns":
        return replace(self, groups=[group.map(function) for group in self.groups])


@dataclass(frozen=True)
class Shares:
    """The sums of gradients of replicated groups, from the owners of keys to all ranks, in one part."""

    groups: dict[int, GroupSends]
    """By number of the group. Indices of touched keys whose sums arrive, and of owned keys whose sums are sent."""
    sums_in: MessageSizes
    sums_out: MessageSizes

    def map(self, function: Callable[[Tensor], Tensor]) -> "Shares":
        return replace(self, groups={g: group.map(function) for g, group in self.groups.items()})


@dataclass
class Plan:
    """The plan of all groups of a batch."""

    window: str
    sends: Sends
    returns: Returns | None
    """None until the next batch is routed, if gradients may be late."""
    shares: Shares | None = None
    """None without replicated tables that are trained."""
    bags: dict[int, OwnedBags] = field(default_factory=dict)
    """What the owner adds up for features that are pooled there, by number of the group."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Plan":
        returns = None if self.returns is None else self.returns.map(function)
        shares = None if self.shares is None else self.shares.map(function)
        bags = {g: owned.map(function) for g, owned in self.bags.items()}
        return Plan(self.window, self.sends.map(function), returns, shares, bags)


@dataclass(frozen=True)
class Marks:
    """Keys of one group that are marked as early or late."""

    positions: Tensor
    """Requester: [positions] bool."""
    owned: Tensor
    """Owner: [owned keys] bool."""


RowBytes = Callable[[TableGroup], int]
"""Size of a group's rows in messages."""


def plan_sends(route: Route, window: str, rank: int, row_bytes: RowBytes, early: list[Marks] | None = None) -> Sends:
    """Plans how the rows of a batch travel among several ranks. early: None if there is no part for early rows."""
    marks = early if early is not None else [None] * len(route.owner_dedups)
    lists = zip(route.batch.groups, route.owner_dedups, route.replicas, marks, strict=True)
    groups = [
        _group_sends(dedup, owner, mark, window, rank)
        if replica is None
        else _replica_sends(dedup, replica, mark, window, rank)
        for dedup, owner, replica, mark in lists
    ]
    groups += _bag_sends(route, rank, num_early=int(early is not None))
    widths = [row_bytes(group.group) for group in groups]
    rows_in, lists_in = lay_out([group.rows_in for group in groups], widths)
    rows_out, lists_out = lay_out([group.rows_out for group in groups], widths)
    pairs = zip(groups, lists_in, lists_out, strict=True)
    groups = [replace(group, rows_in=into, rows_out=out) for group, into, out in pairs]
    return Sends(groups, rows_in, rows_out, num_early=int(early is not None))


def plan_returns(route: Route, window: str, rank: int, row_bytes: RowBytes, late: list[Marks] | None = None) -> Returns:
    """Plans how the gradients of a batch travel among several ranks. late: None if none are."""
    if not any(owner.group.allows_late_gradients for owner in route.owner_dedups):
        late = None
    marks = late if late is not None else [None] * len(route.owner_dedups)
    trios = zip(route.batch.groups, route.owner_dedups, marks, strict=True)
    groups = [_group_returns(dedup, owner, mark, window, rank) for dedup, owner, mark in trios]
    groups += _bag_returns(route, rank, [group.sums for group in groups], num_late=int(late is not None))
    widths = [row_bytes(group.group) for group in groups]
    gradients_in, lists_in = lay_out([group.gradients_in for group in groups], widths)
    gradients_out, lists_out = lay_out([group.gradients_out for group in groups], widths)
    pairs = zip(groups, lists_in, lists_out, strict=True)
    groups = [replace(group, gradients_in=into, gradients_out=out) for group, into, out in pairs]
    return Returns(groups, gradients_in, gradients_out, has_late=late is not None)


def plan_shares(route: Route, rank: int) -> Shares | None:
    """Plans how owners send the sums of their keys of replicated groups to all ranks."""
    groups = {
        g: _group_shares(owner, replica, rank)
        for g, (owner, replica) in enumerate(zip(route.owner_dedups, route.replicas, strict=True))
        if replica is not None and not owner.group.frozen
    }
    if not groups:
        return None
    widths = [group.group.row_bytes for group in groups.values()]
    sums_in, lists_in = lay_out([group.rows_in for group in groups.values()], widths)
    sums_out, lists_out = lay_out([group.rows_out for group in groups.values()], widths)
    trios = zip(groups.items(), lists_in, lists_out, strict=True)
    return Shares({g: replace(group, rows_in=into, rows_out=out) for (g, group), into, out in trios}, sums_in, sums_out)


def make_plan(
    route: Route, window: str, rank: int, row_bytes: RowBytes, gradient_bytes: RowBytes | None = None
) -> Plan:
    """Plans the exchanges of a batch of which nothing is early or late. gradient_bytes: None if gradients have the size
    of rows."""
    gradient_bytes = gradient_bytes or row_bytes
    sends = plan_sends(route, window, rank, row_bytes)
    if _is_symmetric(route, row_bytes, gradient_bytes):
        returns = _reversed(sends, route, rank)
    else:
        returns = plan_returns(route, window, rank, gradient_bytes)
    return Plan(window, sends, returns, plan_shares(route, rank), owned_bags(route))


def owned_bags(route: Route) -> dict[int, OwnedBags]:
    """Returns what this rank adds up as owner, by number of the group."""
    return {g: owner.bags for g, owner in enumerate(route.owner_dedups) if owner.bags is not None}


def _is_symmetric(route: Route, row_bytes: RowBytes, gradient_bytes: RowBytes) -> bool:
    """Returns whether each row travels once, and its gradient takes the same way back."""
    groups = [dedup.group for dedup in route.batch.groups]
    return (
        route.batch.num_micro_batches == 1
        and not route.batch.bags
        and all(
            not group.frozen and not group.is_replicated and row_bytes(group) == gradient_bytes(group)
            for group in groups
        )
    )


def _reversed(sends: Sends, route: Route, rank: int) -> Returns:
    """Returns what plan_returns would for a symmetric exchange."""
    groups = []
    for group, owner in zip(sends.groups, route.owner_dedups, strict=True):
        first, end = (int(owner.entry_counts[:r].sum()) for r in (rank, rank + 1))
        entries = torch.arange(len(owner.key_index))
        entries = torch.cat([entries[:first], entries[end:], entries[first:end]])
        sums = KeySums(None, make_segments(*_entries_by_key(owner)))
        into = replace(group.rows_out, places=entries)
        groups.append(GroupReturns(group.group, group.rows_in, into, len(entries), sums, None))
    return Returns(groups, gradients_in=sends.rows_out, gradients_out=sends.rows_in, has_late=False)


def requester_lists(dedup: RequesterDedup, window: str, rank: int) -> tuple[TravelList, TravelList]:
    """Returns the positions whose rows arrive with each micro-batch, and those whose gradients leave with it."""
    num_parts, counts = len(dedup.num_samples), dedup.counts_by_owner
    rows = _listed(dedup.uses, num_parts, "first", window, counts, rank)
    if dedup.group.frozen:
        return rows, _nothing(num_parts, len(counts))
    return rows, _listed(dedup.uses, num_parts, "last", window, counts, rank)


def _listed(uses: Tensor, num_parts: int, which: str, window: str, counts: NDArray[np.int64], rank: int) -> TravelList:
    """Lists the keys that travel with each part. which: "first" on the way out, "last" on the way back. counts: keys of
    each rank."""
    which = "all" if window == "resend" else which
    places, bounds, per_rank = plan_ops.exchange_lists(uses, num_parts, which, torch.from_numpy(counts), rank)
    return TravelList(places, bounds.tolist(), per_rank.numpy())


def _nothing(num_parts: int, num_ranks: int) -> TravelList:
    none = torch.empty(0, dtype=torch.int64)
    return TravelList(none, [0] * (2 * num_parts + 1), np.zeros((num_parts, num_ranks), dtype=np.int64))


def _group_sends(dedup: RequesterDedup, owner: OwnerDedup, early: Marks | None, window: str, rank: int) -> GroupSends:
    num_parts = len(dedup.num_samples)
    wanted, owned = dedup.uses, owner.uses
    if early is not None:
        wanted = with_early_part(wanted, num_parts, early.positions)
        owned = with_early_part(owned, num_parts, early.owned.index_select(0, owner.key_index))
        num_parts += 1
    rows_in = _listed(wanted, num_parts, "first", window, dedup.counts_by_owner, rank)
    entries_out = _listed(owned, num_parts, "first", window, owner.entry_counts, rank)
    return GroupSends(dedup.group, _by_row(rows_in, dedup), entries_out.select(owner.key_index))


def _replica_sends(dedup: RequesterDedup, replica: Replica, early: Marks | None, window: str, rank: int) -> GroupSends:
    """All rows come from this rank's own replica."""
    num_parts, counts = len(dedup.num_samples), np.zeros_like(replica.owner_counts)
    counts[rank] = len(dedup.keys)
    wanted = dedup.uses
    if early is not None:
        wanted = with_early_part(wanted, num_parts, early.positions)
        num_parts += 1
    rows = _listed(wanted, num_parts, "first", window, counts, rank)
    return GroupSends(dedup.group, _by_row(rows, dedup), rows.select(replica.positions))


def _group_shares(owner: OwnerDedup, replica: Replica, rank: int) -> GroupSends:
    """Each owner sends all its sums to every rank."""
    num_ranks, num_own = len(replica.owner_counts), len(owner.keys)
    first = int(replica.owner_counts[:rank].sum())
    others = torch.cat([replica.by_owner[:first], replica.by_owner[first + num_own :]])
    places_in = torch.cat([others, replica.by_owner[first : first + num_own]])
    counts_in, counts_out = replica.owner_counts.copy(), np.full(num_ranks, num_own)
    counts_in[rank] = counts_out[rank] = 0
    num_sent = (num_ranks - 1) * num_own
    into = TravelList(places_in, [0, len(others), len(places_in)], counts_in[None])
    out = TravelList(torch.arange(num_own).repeat(num_ranks), [0, num_sent, num_sent + num_own], counts_out[None])
    return GroupSends(owner.group, into, out)


def _group_returns(
    dedup: RequesterDedup, owner: OwnerDedup, late: Marks | None, window: str, rank: int
) -> GroupReturns:
    num_parts, num_ranks = len(dedup.num_samples), len(owner.entry_counts)
    wanted, owned = dedup.uses, owner.uses
    if late is not None:
        wanted = with_late_part(wanted, num_parts, late.positions)
        owned = with_late_part(owned, num_parts, late.owned.index_select(0, owner.key_index))
        num_parts += 1
    out = into = _nothing(num_parts, num_ranks)
    if not dedup.group.frozen:
        out = _by_row(_listed(wanted, num_parts, "last", window, dedup.counts_by_owner, rank), dedup)
        into = _listed(owned, num_parts, "last", window, owner.entry_counts, rank)
    order, offsets = _entries_by_key(owner)
    sums, late_sums = KeySums(None, make_segments(order, offsets)), None
    if late is not None and dedup.group.allows_late_gradients:
        sums, late_sums = (_sums_of(keys, order, offsets) for keys in (~late.owned, late.owned))
    return GroupReturns(dedup.group, out, into, len(owner.key_index), sums, late_sums)


def _by_row(travel: TravelList, dedup: RequesterDedup) -> TravelList:
    """Turns positions into rows of the only micro-batch, if there is one: its rows are not copied once more."""
    if len(dedup.num_samples) > 1 or len(dedup.group.tables) == 1:
        return travel
    return travel.select(by_table(dedup.counts.numpy()))


def _bag_sends(route: Route, rank: int, num_early: int) -> list[GroupSends]:
    """Partial sums travel with their micro-batch; none is early."""
    pairs = zip(route.batch.bags, owned_bags(route).values(), strict=True)
    lists = [(bags.group, bags.travel_list(rank), owned.travel_list(rank)) for bags, owned in pairs]
    return [GroupSends(group, into.widened(num_early, 0), out.widened(num_early, 0)) for group, into, out in lists]


def _bag_returns(route: Route, rank: int, row_sums: Sequence[KeySums], num_late: int) -> list[GroupReturns]:
    """Gradients of partial sums travel with their micro-batch; none is late. row_sums: those of all groups."""
    returns = []
    for bags, (g, owned) in zip(route.batch.bags, owned_bags(route).items(), strict=True):
        out, into = bags.travel_list(rank), owned.travel_list(rank)
        if bags.group.frozen:
            out = into = _nothing(len(bags.parts), len(bags.counts))
        summed, places = row_sums[g].keys, owned.keys
        if summed is not None:  # without late ones, which no bag has
            places = torch.searchsorted(summed, owned.keys)
        sums = KeySums(places, owned.gradients, owned.gradient_weights)
        lists = out.widened(0, num_late), into.widened(0, num_late)
        returns.append(GroupReturns(bags.group, *lists, owned.num_sums, sums, None))
    return returns


def _sums_of(is_in: Tensor, order: Tensor, offsets: Tensor) -> KeySums:
    """Returns the sums of some owned keys. order, offsets: the entries of all keys."""
    keys, lengths = is_in.nonzero().flatten(), offsets.diff()
    ends = torch.zeros(len(keys) + 1, dtype=torch.int64)
    torch.cumsum(lengths[keys], 0, out=ends[1:])
    entries = order[torch.repeat_interleave(is_in, lengths)]
    return KeySums(keys, make_segments(entries, ends))


def _entries_by_key(dedup: OwnerDedup) -> tuple[Tensor, Tensor]:
    offsets, _, entries = group_by_row(dedup.key_index, None, len(dedup.keys), with_occurrences=False)
    return entries, offsets
