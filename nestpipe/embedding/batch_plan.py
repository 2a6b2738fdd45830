"""The whole plan of a batch of which nothing travels early or late.

With one micro-batch, every row travels once and its gradient takes the same way back: then one native call lists both.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.plan import owned_bags, plan_returns, plan_sends, plan_shares
from nestpipe.embedding.plan_parts import GroupReturns, GroupSends, KeySums, Plan, Returns, RowBytes, Sends
from nestpipe.embedding.route import Route
from nestpipe.embedding.travel import TravelList, lay_out
from nestpipe.kernels.rows.segments import make_segments
from nestpipe.store.native import plan_ops


def make_plan(
    route: Route, window: str, rank: int, row_bytes: RowBytes, gradient_bytes: RowBytes | None = None
) -> Plan:
    """Plans the exchanges of a batch of which nothing is early or late. gradient_bytes: None if gradients have the size
    of rows."""
    gradient_bytes = gradient_bytes or row_bytes
    if _is_symmetric(route, row_bytes, gradient_bytes):
        sends, returns = _plan_symmetric(route, rank, row_bytes)
    else:
        sends = plan_sends(route, window, rank, row_bytes)
        returns = plan_returns(route, window, rank, gradient_bytes)
    return Plan(window, sends, returns, plan_shares(route, rank), bags=owned_bags(route))


def _is_symmetric(route: Route, row_bytes: RowBytes, gradient_bytes: RowBytes) -> bool:
    """Returns whether each row travels once, and its gradient takes the same way back."""
    groups = [dedup.group for dedup in route.batch.groups]
    has_replicas = any(owner.union is not None for owner in route.owner_dedups)
    return (
        route.batch.num_micro_batches == 1
        and not has_replicas
        and not route.batch.bags
        and all(
            not group.frozen and not group.is_replicated and row_bytes(group) == gradient_bytes(group)
            for group in groups
        )
    )


def _plan_symmetric(route: Route, rank: int, row_bytes: RowBytes) -> tuple[Sends, Returns]:
    """Returns what plan_sends and plan_returns do for a symmetric exchange. One native call lists what travels."""
    pairs = list(zip(route.batch.groups, route.owner_dedups, strict=True))
    listed = [
        plan_ops.one_part_lists(d.counts, o.key_index, o.entry_counts, d.keys.shape[0], o.keys.shape[0], rank)
        for d, o in pairs
    ]
    widths = [row_bytes(dedup.group) for dedup, _ in pairs]
    requests = [_one_part(n.rows_in, d.counts_by_owner, rank) for n, (d, _) in zip(listed, pairs, strict=True)]
    entries = [_one_part(n.rows_out, o.entry_counts, rank) for n, (_, o) in zip(listed, pairs, strict=True)]
    rows_in, lists_in = lay_out(requests, widths)
    rows_out, lists_out = lay_out(entries, widths)
    sends, returns = [], []
    for (dedup, _), lists, into, out in zip(pairs, listed, lists_in, lists_out, strict=True):
        num_ranks = len(into.counts[0])  # each asks for a key once
        sums = KeySums(None, make_segments(lists.order, lists.offsets, longest=num_ranks))
        arriving = replace(out, places=lists.entries)
        sends.append(GroupSends(dedup.group, into, out))
        returns.append(GroupReturns(dedup.group, into, arriving, len(lists.entries), sums, None))
    return Sends(sends, rows_in, rows_out, num_early=0), Returns(returns, rows_out, rows_in, has_late=False)


def _one_part(places: Tensor, counts: NDArray[np.int64], rank: int) -> TravelList:
    """Returns the list of an only part. counts: [ranks] keys of each rank, this one's at the end of `places`."""
    others = counts.copy()
    others[rank] = 0
    number = places.shape[0]
    return TravelList(places, [0, number - int(counts[rank]), number], others[None])
