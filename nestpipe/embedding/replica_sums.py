"""The plan by which the ranks of a replica group add up what their sharding groups have summed.

A rank sums the gradients of its own sharding group, for the keys that this group needs, and sends the sums to all of
its replica group. Each of them adds the same sums in order of sharding group. So the replicas of a row stay equal, to
the bit. Urgent sums and late ones travel apart.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.travel import MessageSizes, TravelList, lay_out
from nestpipe.embedding.union import UnionKeys
from nestpipe.kernels.rows.segments import Segments, make_segments
from nestpipe.store import group_by_row


@dataclass(frozen=True)
class GroupReplicaSums:
    """The sums of one table group. The sums of all sharding groups are numbered group after group."""

    group: TableGroup
    sums_out: TravelList
    """This rank's sums that are sent, in one part: to each other rank the same."""
    sums_in: TravelList
    """Numbers of the sums that arrive, and of the own ones."""
    num_sums: int
    keys: Tensor | None
    """Indices of the keys in the union, ascending; None for all."""
    by_key: Segments
    """Sums of each key, in order of sharding group."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "GroupReplicaSums":
        return replace(
            self,
            sums_out=self.sums_out.map(function),
            sums_in=self.sums_in.map(function),
            keys=None if self.keys is None else function(self.keys),
            by_key=self.by_key.map(function),
        )


@dataclass(frozen=True)
class ReplicaSums:
    """The sums that travel in one message."""

    groups: dict[int, GroupReplicaSums]
    """By number of the table group."""
    sums_in: MessageSizes
    sums_out: MessageSizes

    def map(self, function: Callable[[Tensor], Tensor]) -> "ReplicaSums":
        return replace(self, groups={g: group.map(function) for g, group in self.groups.items()})


def plan_replica_sums(
    unions: dict[int, UnionKeys], is_in: dict[int, Tensor | None], row_bytes: Callable[[TableGroup], int]
) -> ReplicaSums:
    """Plans a message. is_in: by table group, the keys of the union whose sums it has; None for all."""
    groups = [_group(union, is_in[g]) for g, union in unions.items()]
    widths = [row_bytes(group.group) for group in groups]
    sums_in, lists_in = lay_out([group.sums_in for group in groups], widths)
    sums_out, lists_out = lay_out([group.sums_out for group in groups], widths)
    trios = zip(groups, lists_in, lists_out, strict=True)
    groups = [replace(group, sums_in=into, sums_out=out) for group, into, out in trios]
    return ReplicaSums(dict(zip(unions, groups, strict=True)), sums_in, sums_out)


def _group(union: UnionKeys, is_in: Tensor | None) -> GroupReplicaSums:
    mesh, places, counts, keys = union.mesh, union.places, union.counts, None
    num_keys = len(union.touched.keys)
    if is_in is not None:
        keys = is_in.nonzero().flatten()
        has_sum = is_in[places]
        ends = np.cumsum(counts)
        before = np.concatenate([[0], np.cumsum(has_sum.numpy())])
        counts = before[ends] - before[ends - counts]
        places, num_keys = (is_in.cumsum(0) - 1)[places[has_sum]], len(keys)
    offsets, _, by_key = group_by_row(places, None, num_keys, with_occurrences=False)
    own = slice(int(counts[: mesh.replica].sum()), int(counts[: mesh.replica + 1].sum()))
    numbers, num_own = torch.arange(len(places)), own.stop - own.start
    sums_in = torch.cat([numbers[: own.start], numbers[own.stop :], numbers[own]])
    sums_out = numbers[:num_own].repeat(len(counts))
    counts_in, counts_out = np.zeros((2, 1, mesh.size), dtype=np.int64)
    counts_in[0, mesh.replica_group], counts_out[0, mesh.replica_group] = counts, num_own
    counts_in[0, mesh.rank] = counts_out[0, mesh.rank] = 0
    return GroupReplicaSums(
        union.touched.group,
        TravelList(sums_out, [0, len(sums_out) - num_own, len(sums_out)], counts_out),
        TravelList(sums_in, [0, len(sums_in) - num_own, len(sums_in)], counts_in),
        len(places),
        keys,
        make_segments(by_key, offsets),
    )
