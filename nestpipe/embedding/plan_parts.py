"""The parts of a plan: lists of what travels, by group, and the sizes of messages. See plan.py."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.owned_bags import OwnedBags
from nestpipe.embedding.replica_sums import ReplicaSums
from nestpipe.embedding.travel import MessageSizes, TravelList
from nestpipe.kernels.rows.segments import Segments


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
    """First one for each table group: its rows. Then one for each of FeatureGroups.bag_groups: its partial sums."""
    rows_in: MessageSizes
    rows_out: MessageSizes
    num_early: int
    """1 if part 0 has early rows, so that micro-batch i is part i + 1; otherwise 0."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Sends":
        return replace(self, groups=[group.map(function) for group in self.groups])


@dataclass(frozen=True)
class KeySums:
    """The gradients of owned keys: which keys, and the entries that are added for each. With several sharding groups
    they are those of this rank's own one."""

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
    replica_sums: ReplicaSums | None = None
    """With several sharding groups: the sums of keys that are updated at the end of the batch."""
    late_replica_sums: ReplicaSums | None = None
    """Those of late gradients; None if nothing is late."""
    inside: "Returns | None" = None
    """Gradients on the way inside the host, if these travel between hosts; None if there is one hop."""
    relay_sums: list[list[Segments]] | None = None
    """[groups][parts] entries inside the host that are added for each gradient that travels between hosts."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Returns":
        return replace(
            self,
            groups=[group.map(function) for group in self.groups],
            replica_sums=self.replica_sums and self.replica_sums.map(function),
            late_replica_sums=self.late_replica_sums and self.late_replica_sums.map(function),
            inside=self.inside and self.inside.map(function),
            relay_sums=self.relay_sums and [[part.map(function) for part in parts] for parts in self.relay_sums],
        )


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
    inside: Sends | None = None
    """Rows on the way inside the host, if `sends` are between hosts; None if there is one hop."""
    bags: dict[int, OwnedBags] = field(default_factory=dict)
    """What the owner adds up for features that are pooled there, by number of the group."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Plan":
        returns = None if self.returns is None else self.returns.map(function)
        shares = None if self.shares is None else self.shares.map(function)
        inside = None if self.inside is None else self.inside.map(function)
        bags = {g: owned.map(function) for g, owned in self.bags.items()}
        return Plan(self.window, self.sends.map(function), returns, shares, inside, bags)


@dataclass(frozen=True)
class Marks:
    """Keys of one group that are marked as early or late."""

    positions: Tensor
    """Requester: [positions] bool."""
    owned: Tensor
    """Owner: [owned keys] bool."""
    inside: "Marks | None" = None
    """The same keys on the way inside the host, if these are between hosts; None if there is one hop."""


@dataclass(frozen=True)
class Asked:
    """Keys of one group that this rank asks other ranks for, on one hop."""

    group: TableGroup
    uses: Tensor
    """[n, bytes] bits of the micro-batches that use each key."""
    counts: NDArray[np.int64]
    """[ranks] keys that each rank is asked for."""
    num_micro_batches: int
    rows: Tensor | None
    """Place of each key's row in the memory where rows arrive; None if they are in order of the keys."""


RowBytes = Callable[[TableGroup], int]
"""Size of a group's rows in messages."""
