"""The plan of a batch: the rows and gradients that travel with each of its parts.

A part is a micro-batch. In window "once" a row travels with the first micro-batch that uses it, and its gradient with
the last one. In window "resend" both travel with every micro-batch that uses the row. Exchange across batches (see
crossing.py) adds two parts: early rows, which travel before the first micro-batch, and late gradients, which travel
after the last one. For a key that is marked they take the place of its first, or last, micro-batch.

Requester and owner derive the same plan from the bits that say which micro-batches use a key. All lists hold indices,
so that they can be mapped from keys to rows or slots.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.dedup import RequesterDedup
from nestpipe.embedding.owned_bags import OwnedBags
from nestpipe.embedding.part_bits import with_early_part, with_late_part
from nestpipe.embedding.plan_parts import (
    Asked,
    GroupReturns,
    GroupSends,
    KeySums,
    Marks,
    Returns,
    RowBytes,
    Sends,
    Shares,
)
from nestpipe.embedding.replica import Replica, by_table
from nestpipe.embedding.replica_sums import plan_replica_sums
from nestpipe.embedding.route import OwnerDedup, Route
from nestpipe.embedding.travel import TravelList, lay_out
from nestpipe.kernels.rows.segments import make_segments
from nestpipe.store import group_by_row
from nestpipe.store.native import plan_ops

WINDOWS = ("once", "resend")


def plan_sends(route: Route, window: str, rank: int, row_bytes: RowBytes, early: list[Marks] | None = None) -> Sends:
    """Plans how the rows of a batch travel among several ranks. early: None if there is no part for early rows."""
    marks = early if early is not None else [None] * len(route.owner_dedups)
    lists = zip(route.batch.groups, route.owner_dedups, route.replicas, marks, strict=True)
    groups = [
        group_sends(asked_by(dedup), owner, mark, window, rank)
        if replica is None
        else _replica_sends(dedup, replica, mark, window, rank)
        for dedup, owner, replica, mark in lists
    ]
    groups += _bag_sends(route, rank, num_early=int(early is not None))
    return laid_out_sends(groups, row_bytes, has_early=early is not None)


def laid_out_sends(groups: list[GroupSends], row_bytes: RowBytes, has_early: bool) -> Sends:
    widths = [row_bytes(group.group) for group in groups]
    rows_in, lists_in = lay_out([group.rows_in for group in groups], widths)
    rows_out, lists_out = lay_out([group.rows_out for group in groups], widths)
    pairs = zip(groups, lists_in, lists_out, strict=True)
    groups = [replace(group, rows_in=into, rows_out=out) for group, into, out in pairs]
    return Sends(groups, rows_in, rows_out, num_early=int(has_early))


def plan_returns(route: Route, window: str, rank: int, row_bytes: RowBytes, late: list[Marks] | None = None) -> Returns:
    """Plans how the gradients of a batch travel among several ranks. late: None if none are."""
    late = allowed_late(route, late)
    marks = late if late is not None else [None] * len(route.owner_dedups)
    trios = zip(route.batch.groups, route.owner_dedups, marks, strict=True)
    groups = [group_returns(asked_by(dedup), owner, mark, window, rank) for dedup, owner, mark in trios]
    groups += _bag_returns(route, rank, [group.sums for group in groups], num_late=int(late is not None))
    returns = laid_out_returns(groups, row_bytes, has_late=late is not None)
    return _with_replica_sums(returns, route, marks, row_bytes)


def allowed_late(route: Route, late: list[Marks] | None) -> list[Marks] | None:
    """Returns the marks of late gradients; None if no group may have any."""
    return late if any(owner.group.allows_late_gradients for owner in route.owner_dedups) else None


def laid_out_returns(groups: list[GroupReturns], row_bytes: RowBytes, has_late: bool) -> Returns:
    widths = [row_bytes(group.group) for group in groups]
    gradients_in, lists_in = lay_out([group.gradients_in for group in groups], widths)
    gradients_out, lists_out = lay_out([group.gradients_out for group in groups], widths)
    pairs = zip(groups, lists_in, lists_out, strict=True)
    groups = [replace(group, gradients_in=into, gradients_out=out) for group, into, out in pairs]
    return Returns(groups, gradients_in, gradients_out, has_late)


def _with_replica_sums(returns: Returns, route: Route, marks: Sequence[Marks | None], row_bytes: RowBytes) -> Returns:
    """Adds the sums that replica groups exchange, if there are several sharding groups."""
    owners = route.owner_dedups
    unions = {g: owner.union for g, owner in enumerate(owners) if owner.union is not None and not owner.group.frozen}
    if not unions:
        return returns
    late = {g: mark.owned for g in unions if (mark := marks[g]) is not None and owners[g].group.allows_late_gradients}
    is_urgent = {g: ~late[g] if g in late else None for g in unions}
    sums, late_sums = plan_replica_sums(unions, is_urgent, row_bytes), None
    if returns.has_late:
        late_sums = plan_replica_sums({g: unions[g] for g in late}, {**late}, row_bytes)
    return replace(returns, replica_sums=sums, late_replica_sums=late_sums)


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


def owned_bags(route: Route) -> dict[int, OwnedBags]:
    """Returns what this rank adds up as owner, by number of the group."""
    return {g: owner.bags for g, owner in enumerate(route.owner_dedups) if owner.bags is not None}


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


def asked_by(dedup: RequesterDedup) -> Asked:
    num_parts = len(dedup.num_samples)
    return Asked(dedup.group, dedup.uses, dedup.counts_by_owner, num_parts, row_of_each(dedup))


def group_sends(asked: Asked, owner: OwnerDedup, early: Marks | None, window: str, rank: int) -> GroupSends:
    num_parts = asked.num_micro_batches
    wanted, owned = asked.uses, owner.uses
    if early is not None:
        wanted = with_early_part(wanted, num_parts, early.positions)
        owned = with_early_part(owned, num_parts, early.owned.index_select(0, owner.key_index))
        num_parts += 1
    rows_in = _listed(wanted, num_parts, "first", window, asked.counts, rank)
    entries_out = _listed(owned, num_parts, "first", window, owner.entry_counts, rank)
    return GroupSends(asked.group, _by_row(rows_in, asked.rows), entries_out.select(owner.key_index))


def _replica_sends(dedup: RequesterDedup, replica: Replica, early: Marks | None, window: str, rank: int) -> GroupSends:
    """All rows come from this rank's own replica."""
    num_parts, counts = len(dedup.num_samples), np.zeros_like(replica.owner_counts)
    counts[rank] = len(dedup.keys)
    wanted = dedup.uses
    if early is not None:
        wanted = with_early_part(wanted, num_parts, early.positions)
        num_parts += 1
    rows = _listed(wanted, num_parts, "first", window, counts, rank)
    return GroupSends(dedup.group, _by_row(rows, row_of_each(dedup)), rows.select(replica.positions))


def _group_shares(owner: OwnerDedup, replica: Replica, rank: int) -> GroupSends:
    """Each owner sends all its sums to every rank of its sharding group."""
    num_ranks, num_own = len(replica.owner_counts), len(owner.keys)
    ranks = range(num_ranks) if owner.union is None else owner.union.mesh.sharding_group
    first = int(replica.owner_counts[:rank].sum())
    others = torch.cat([replica.by_owner[:first], replica.by_owner[first + num_own :]])
    places_in = torch.cat([others, replica.by_owner[first : first + num_own]])
    counts_in, counts_out = replica.owner_counts.copy(), np.zeros(num_ranks, dtype=np.int64)
    counts_out[ranks.start : ranks.stop] = num_own
    counts_in[rank] = counts_out[rank] = 0
    num_sent = (len(ranks) - 1) * num_own
    into = TravelList(places_in, [0, len(others), len(places_in)], counts_in[None])
    out = TravelList(torch.arange(num_own).repeat(len(ranks)), [0, num_sent, num_sent + num_own], counts_out[None])
    return GroupSends(owner.group, into, out)


def group_returns(asked: Asked, owner: OwnerDedup, late: Marks | None, window: str, rank: int) -> GroupReturns:
    num_parts, num_ranks = asked.num_micro_batches, len(owner.entry_counts)
    wanted, owned = asked.uses, owner.uses
    if late is not None:
        wanted = with_late_part(wanted, num_parts, late.positions)
        owned = with_late_part(owned, num_parts, late.owned.index_select(0, owner.key_index))
        num_parts += 1
    out = into = _nothing(num_parts, num_ranks)
    if not asked.group.frozen:
        out = _by_row(_listed(wanted, num_parts, "last", window, asked.counts, rank), asked.rows)
        into = _listed(owned, num_parts, "last", window, owner.entry_counts, rank)
    order, offsets = entries_by_key(owner)
    has_late = late is not None and asked.group.allows_late_gradients
    if owner.union is not None:
        is_own = torch.zeros(len(owner.keys), dtype=torch.bool)
        is_own[owner.union.positions] = True
        late_own = late.owned & is_own if late is not None and has_late else None
        sums = _sums_of(is_own if late_own is None else is_own & ~late_own, order, offsets)
        late_sums = None if late_own is None else _sums_of(late_own, order, offsets)
    elif late is not None and has_late:
        sums, late_sums = (_sums_of(keys, order, offsets) for keys in (~late.owned, late.owned))
    else:
        sums, late_sums = KeySums(None, make_segments(order, offsets)), None
    return GroupReturns(asked.group, out, into, len(owner.key_index), sums, late_sums)


def row_of_each(dedup: RequesterDedup) -> Tensor | None:
    """Returns the row of each position in the only micro-batch, if there is one: its rows are not copied once more."""
    if len(dedup.num_samples) > 1 or len(dedup.group.tables) == 1:
        return None
    return by_table(dedup.counts.numpy())


def _by_row(travel: TravelList, rows: Tensor | None) -> TravelList:
    """Turns positions into rows."""
    return travel if rows is None else travel.select(rows)


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


def entries_by_key(dedup: OwnerDedup) -> tuple[Tensor, Tensor]:
    offsets, _, entries = group_by_row(dedup.key_index, None, len(dedup.keys), with_occurrences=False)
    return entries, offsets
