"""The plan of a batch whose rows and gradients travel in two hops.

On each hop a row travels with the first micro-batch that uses it, and its gradient with the last one. Between hosts
that is a micro-batch of any rank of the host, inside the host one of the requester. So with each micro-batch rows
travel between hosts and then inside them, gradients inside the hosts and then between them, and a relay has what it
has to hand on.

A relay adds the gradients of its host's ranks in order of rank, once for each key, when the last has arrived.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nestpipe.embedding.dedup import RequesterDedup
from nestpipe.embedding.plan import (
    allowed_late,
    entries_by_key,
    group_returns,
    group_sends,
    laid_out_returns,
    laid_out_sends,
    row_of_each,
)
from nestpipe.embedding.plan_parts import Asked, GroupReturns, Marks, Returns, RowBytes, Sends
from nestpipe.embedding.route import Hops, OwnerDedup, Route
from nestpipe.embedding.travel import TravelList
from nestpipe.kernels.rows.segments import Segments, make_segments

WINDOW = "once"
Places = tuple[int, int]
"""Number of this rank among those of its hop inside the host, and of its hop between hosts."""


def plan_hop_sends(
    route: Route, places: Places, row_bytes: RowBytes, plain_bytes: RowBytes, early: list[Marks] | None
) -> tuple[Sends, Sends]:
    """Plans how rows travel inside the host, and between hosts. row_bytes: size of rows between hosts; plain_bytes:
    inside them. early: None if there is no part for early rows."""
    inside, between = [], []
    for (dedup, hops, owner), mark in zip(_groups(route), early or _no_marks(route), strict=True):
        lists = _asked_inside(dedup, hops), hops.relayed, None if mark is None else mark.inside
        inside.append(group_sends(*lists, WINDOW, places[0]))
        between.append(group_sends(_asked_between(dedup, hops), owner, mark, WINDOW, places[1]))
    has_early = early is not None
    return laid_out_sends(inside, plain_bytes, has_early), laid_out_sends(between, row_bytes, has_early)


def plan_hop_returns(
    route: Route, places: Places, gradient_bytes: RowBytes, plain_bytes: RowBytes, late: list[Marks] | None
) -> Returns:
    """Plans how gradients travel. late: None if none are."""
    late = allowed_late(route, late)
    inside, between, sums = [], [], []
    for (dedup, hops, owner), mark in zip(_groups(route), late or _no_marks(route), strict=True):
        lists = _asked_inside(dedup, hops), hops.relayed, None if mark is None else mark.inside
        inside.append(group_returns(*lists, WINDOW, places[0]))
        group = group_returns(_asked_between(dedup, hops), owner, mark, WINDOW, places[1])
        sums.append(_relay_sums(group.gradients_out, hops.relayed))
        between.append(_from_sums(group))
    returns = laid_out_returns(between, gradient_bytes, late is not None)
    return replace(returns, inside=laid_out_returns(inside, plain_bytes, late is not None), relay_sums=sums)


def _groups(route: Route) -> Sequence[tuple[RequesterDedup, Hops, OwnerDedup]]:
    assert route.hops is not None
    return list(zip(route.batch.groups, route.hops, route.owner_dedups, strict=True))


def _no_marks(route: Route) -> list[None]:
    return [None] * len(route.owner_dedups)


def _asked_inside(dedup: RequesterDedup, hops: Hops) -> Asked:
    rows, positions = row_of_each(dedup), hops.inside.positions
    assert positions is not None
    places = positions if rows is None else rows[positions]
    return Asked(dedup.group, hops.inside.uses, hops.inside.counts_by_owner, len(dedup.num_samples), places)


def _asked_between(dedup: RequesterDedup, hops: Hops) -> Asked:
    return Asked(dedup.group, hops.between.uses, hops.between.counts_by_owner, len(dedup.num_samples), None)


def _relay_sums(travel: TravelList, relayed: OwnerDedup) -> list[Segments]:
    """Returns, for each part, the entries of each key whose gradient leaves the host with it, in order of rank.
    travel: the keys by part."""
    order, offsets = entries_by_key(relayed)
    keys, lengths = travel.places, offsets.diff()[travel.places]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shifts = torch.repeat_interleave(offsets[keys] - ends[:-1], lengths)
    entries = order[shifts + torch.arange(len(shifts))]
    sums, bounds = [], travel.bounds[::2]
    for first, end in pairwise(bounds):
        span = slice(int(ends[first]), int(ends[end]))
        sums.append(make_segments(entries[span], ends[first : end + 1] - ends[first]))
    return sums


def _from_sums(group: GroupReturns) -> GroupReturns:
    """Returns the gradients of a relay with their places among the sums of their part, instead of those of all keys."""
    travel = group.gradients_out
    starts = np.repeat(travel.bounds[:-1:2], np.diff(travel.bounds[::2]))
    places: Tensor = torch.arange(len(travel.places)) - torch.from_numpy(starts)
    return replace(group, gradients_out=replace(travel, places=places))
