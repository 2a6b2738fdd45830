"""The exchange among several ranks: one message carries the rows of all groups and tables.

Rows are gathered into a message and copied from it to their places, without a temporary copy. A rank copies its own
rows while the message travels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.device.streams import use_here
from nestpipe.distributed import Channel, Notice
from nestpipe.embedding.batch_plan import make_plan
from nestpipe.embedding.crossing import Crossing, compare
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.exchange import RowGradients
from nestpipe.embedding.exchange.codec import EXACT, PLAIN, Codecs
from nestpipe.embedding.exchange.outgoing import Outgoing
from nestpipe.embedding.exchange.over_replicas import sum_over_replicas
from nestpipe.embedding.exchange.partial_sums import SumOwner
from nestpipe.embedding.exchange.requester import Requester, make_requesters
from nestpipe.embedding.group import FeatureGroups
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.embedding.owned_bags import OwnedBags
from nestpipe.embedding.plan import owned_bags, plan_returns, plan_sends, plan_shares
from nestpipe.embedding.plan_parts import GroupReturns, KeySums, Marks, Plan, Returns, Sends, Shares
from nestpipe.embedding.replica_sums import ReplicaSums
from nestpipe.embedding.resident import ResidentRows, RowSource
from nestpipe.embedding.route import Route, agree, route_keys
from nestpipe.embedding.travel import MessageSizes, TravelList


class DistributedExchange:
    """See Exchange."""

    def __init__(
        self, route: Channel, rows: Channel, gradients: Channel, memory: Memory, codecs: Codecs = EXACT
    ) -> None:
        self.size = route.size
        self.num_owners = route.mesh.num_shards
        self._route = route
        self._rows = rows
        self._gradients = gradients
        self._memory = memory
        self._codecs = codecs

    def route(self, batch: BatchDedup | Exception, features: FeatureGroups, notice: Notice) -> Route | None:
        mesh = self._route.mesh
        if isinstance(batch, BatchDedup) and mesh.num_replicas > 1:
            batch = batch.asking(mesh.sharding_group, mesh.size)
        return route_keys(batch, features, self._route, notice)

    def compare(self, earlier: Route, later: Route, has_late: bool, num_threads: int) -> Crossing:
        return compare(earlier, later, self._route, has_late, num_threads)

    def plan(
        self, route: Route, window: str, early: list[Marks] | None = None, has_returns: bool = True
    ) -> Plan | None:
        rank, row_bytes = self._route.rank, self._codecs.rows.row_bytes
        if early is None and has_returns:
            return make_plan(route, window, rank, row_bytes, self._codecs.gradients.row_bytes)
        sends = plan_sends(route, window, rank, row_bytes, early)
        returns = self.plan_returns(route, window, None) if has_returns else None
        return Plan(window, sends, returns, plan_shares(route, rank), bags=owned_bags(route))

    def plan_returns(self, route: Route, window: str, late: list[Marks] | None) -> Returns | None:
        return plan_returns(route, window, self._route.rank, self._codecs.gradients.row_bytes, late)

    def agree(self, error: Exception | None) -> None:
        agree(error, self._route)

    def open(self, route: Route, plan: Plan | None, resident: list[ResidentRows] | None) -> "DistributedBatch":
        assert plan is not None
        mesh = self._route.mesh
        num_added = 2 * mesh.num_shards if mesh.num_replicas > 1 else 1  # twice: a sent sum may be rounded up
        requesters = make_requesters(route.batch, plan.window, self._memory, self._codecs, self.size, num_added)
        channels = self._rows, self._gradients
        return DistributedBatch(requesters, plan, resident, *channels, self._memory, self._codecs)


class HopPlan(Protocol):
    """The plan of one hop: Plan, or its part inside a host."""

    @property
    def window(self) -> str: ...
    @property
    def sends(self) -> Sends: ...
    @property
    def returns(self) -> Returns | None: ...
    @property
    def shares(self) -> Shares | None: ...
    @property
    def bags(self) -> Mapping[int, OwnedBags]: ...


class DistributedBatch:
    """See BatchExchange."""

    def __init__(
        self,
        requesters: Sequence[Requester],
        plan: HopPlan,
        sources: Sequence[RowSource] | None,
        rows: Channel,
        gradients: Channel,
        memory: Memory,
        codecs: Codecs,
        writes_ahead: bool = True,
    ) -> None:
        """sources: the rows that are sent, by group; None if they could not be made resident. writes_ahead: they are
        all there before the first is sent."""
        self.exceeds = memory.new_flag()
        self._plan = plan
        self._rows_channel = rows
        self._gradients_channel = gradients
        self._memory = memory
        self._codecs = codecs
        self._num_micro_batches = len(plan.sends.rows_in.num_bytes) - plan.sends.num_early
        self._num_groups = len(plan.sends.groups) - len(plan.bags)
        self._requesters = requesters
        self._writes_ahead = writes_ahead
        self._entries: dict[int, Tensor] = {}
        """Owner: gradient of each entry, by group."""
        self._owners = self._sum_owners(sources) if sources else []
        self._sources = [*(sources or []), *self._owners]
        """Owner: rows, then partial sums, that are sent, by group of the plan; empty if its rows could not be made
        resident."""
        self._outgoing: dict[int, Outgoing] = {}
        """Rows that were written ahead, by part."""
        self._collected: list[Tensor | None] = []
        """Requester: arrays from which gradients were sent last, by group; None for a frozen group."""
        self._shared: dict[int, RowGradients] = {}
        """Sums of replicated groups, by group."""
        self._totals: dict[int, RowGradients] = {}
        """Sums over all sharding groups, if there are several, by group."""
        self._late_totals: dict[int, RowGradients] = {}
        self._with_bags: dict[int, RowGradients] = {}
        """Sums of groups with bags, by group."""

    def _sum_owners(self, sources: Sequence[RowSource]) -> list[SumOwner]:
        groups = [lists.group for lists in self._plan.sends.groups[self._num_groups :]]
        bags = zip(self._plan.bags.items(), groups, strict=True)
        return [SumOwner(owned, group, sources[g], self._memory) for (g, owned), group in bags]

    @cached_property
    def _sent(self) -> list[TravelList]:
        """Owner: places of what is sent, by group of the plan."""
        pairs = zip(self._plan.sends.groups, self._sources, strict=False)
        return [_places_of(lists.rows_out, source) for lists, source in pairs]

    @property
    def row_bytes(self) -> int:
        return sum(self._plan.sends.rows_out.row_bytes)

    @property
    def gradient_bytes(self) -> int:
        returns, sums = self._returns, (self._plan.shares, self._returns.replica_sums, self._returns.late_replica_sums)
        return sum(returns.gradients_out.row_bytes) + sum(sum(s.sums_out.row_bytes) for s in sums if s is not None)

    def send_early_rows(self) -> None:
        self._send(0, 0)

    def send_rows(self, micro_batch: int) -> None:
        self._send(self._plan.sends.num_early + micro_batch, micro_batch)
        for requester in self._requesters:
            requester.gather(micro_batch)

    def _send(self, part: int, micro_batch: int) -> None:
        outgoing = self._outgoing.pop(part, None) or self._write_rows(part)
        sends, codec = self._plan.sends, self._codecs.rows
        targets = [requester.arriving(micro_batch) for requester in self._requesters]
        following = part + 1 if sends.num_early <= part < sends.num_early + self._num_micro_batches - 1 else None

        def meanwhile() -> None:
            # Rows are frozen, so the next message is written while this one travels. This thread then waits only once.
            if self._writes_ahead and outgoing.ready is not None and following is not None:
                self._outgoing[following] = self._write_rows(following)
            for source, sent, lists, target in zip(self._sources, self._sent, sends.groups, targets, strict=False):
                places = sent.own(part), lists.rows_in.own(part)
                codec.copy(self._memory, lists.group, source.sent_from()[0], places[0], target, places[1])

        with self._exchanged(self._rows_channel, outgoing, sends.rows_out, sends.rows_in, part, meanwhile) as received:
            for lists, target in zip(sends.groups, targets, strict=True):
                in_message, places = lists.rows_in.in_message(part), lists.rows_in.others(part)
                codec.read(self._memory, received, in_message, target, places)

    def _write_rows(self, part: int) -> Outgoing:
        """Writes the rows and partial sums that this owner sends to other ranks."""
        micro_batch = part - self._plan.sends.num_early
        for owner in self._owners if micro_batch >= 0 else ():
            owner.fill(micro_batch)
        message = self._memory.empty_message(self._plan.sends.rows_out.num_bytes[part])
        for source, sent in zip(self._sources, self._sent, strict=True):
            rows, _ = source.sent_from()
            self._codecs.rows.write(self._memory, rows, sent.others(part), message, sent.in_message(part))
        return Outgoing(message, self._memory.sealed(message))

    def rows(self, micro_batch: int) -> list[ModelRows]:
        rows = [requester.pop_rows(micro_batch) for requester in self._requesters]
        use_here(*rows)
        groups = self._plan.sends.groups
        return [ModelRows(r.requires_grad_(not lists.group.frozen)) for r, lists in zip(rows, groups, strict=True)]

    @property
    def _returns(self) -> Returns:
        assert self._plan.returns is not None
        return self._plan.returns

    @property
    def _row_returns(self) -> list[GroupReturns]:
        """Returns the gradients of rows, by table group."""
        return self._returns.groups[: self._num_groups]

    def return_gradients(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        use_here(*gradients, self.exceeds)
        self._collected = []
        for g, (lists, requester) in enumerate(zip(self._returns.groups, self._requesters, strict=True)):
            gradient = gradients[g] if len(gradients) > 0 else None
            is_frozen = lists.group.frozen
            self._collected.append(None if is_frozen else requester.collect(micro_batch, gradient, self.exceeds))
        self._return(micro_batch)
        if micro_batch == self._num_micro_batches - 1:
            self._sum_bags()

    def _sum_bags(self) -> None:
        """Adds up the gradients of keys in bags: those of rows, then those of partial sums. A key may be in many bags,
        so no requester can tell whether the sum is finite; the owner does, before the step is committed."""
        for number, g in enumerate(self._plan.bags, start=self._num_groups):
            group, keys, bags = (
                self._returns.groups[g].group,
                self._returns.groups[g].sums,
                self._returns.groups[number].sums,
            )
            if group.frozen:
                continue
            total = self._memory.sum_rows(self.entries_of(g), keys.entries)
            added = self._memory.sum_rows(self.entries_of(number), bags.entries, bags.weights)
            self._memory.add_rows(total, bags.keys, added, None, torch.finfo(group.dtype).max, self.exceeds)
            self._with_bags[g] = RowGradients(total, keys.keys)

    @property
    def has_late_gradients(self) -> bool:
        return self._returns.has_late

    def return_late_gradients(self) -> None:
        use_here(*self._collected)
        self._return(self._num_micro_batches)
        if (plan := self._returns.late_replica_sums) is not None:
            self._late_totals = self._over_replicas(plan, [lists.late_sums for lists in self._returns.groups])

    def _return(self, part: int) -> None:
        returns = self._returns
        message = self._memory.empty_message(returns.gradients_out.num_bytes[part])
        sources = [(g, source) for g, source in enumerate(self._collected) if source is not None]
        for g, source in sources:
            sent = returns.groups[g].gradients_out
            self._codecs.gradients.write(self._memory, source, sent.others(part), message, sent.in_message(part))
        outgoing = Outgoing(message, self._memory.sealed(message))

        def meanwhile() -> None:
            for g, source in sources:
                self._store_own(g, part, source)

        sizes = returns.gradients_out, returns.gradients_in
        with self._exchanged(self._gradients_channel, outgoing, *sizes, part, meanwhile) as received:
            for g, _ in sources:
                self._store_received(g, part, received)

    def _store_own(self, g: int, part: int, source: Tensor) -> None:
        lists = self._returns.groups[g]
        rows, entries = lists.gradients_out.own(part), lists.gradients_in.own(part)
        if self._plan.window == "once":
            self._codecs.gradients.copy(self._memory, lists.group, source, rows, self.entries_of(g), entries)
        else:
            own = self._memory.empty_rows(len(rows), lists.group.dim, lists.group.dtype)
            self._memory.copy_rows(source, rows, own, None)
            self._add_to_entries(g, entries, own)

    def _store_received(self, g: int, part: int, received: Tensor) -> None:
        lists = self._returns.groups[g]
        in_message, entries = lists.gradients_in.in_message(part), lists.gradients_in.others(part)
        if self._plan.window == "once":
            self._codecs.gradients.read(self._memory, received, in_message, self.entries_of(g), entries)
        else:
            rows = self._memory.empty_rows(len(entries), lists.group.dim, lists.group.dtype)
            self._codecs.gradients.read(self._memory, received, in_message, rows, None)
            self._add_to_entries(g, entries, rows)

    def entries_of(self, g: int) -> Tensor:
        """Returns memory for the gradients of entries: uninitialised if each arrives once, zeros if they are resent."""
        if g not in self._entries:
            lists = self._returns.groups[g]
            entries = self._memory.empty_rows(lists.num_entries, lists.group.dim, lists.group.dtype)
            self._entries[g] = entries if self._plan.window == "once" else entries.zero_()
        return self._entries[g]

    def _add_to_entries(self, g: int, entries: Tensor, rows: Tensor) -> None:
        self._memory.add_rows(self.entries_of(g), entries, rows, None, torch.inf, None)

    def share_sums(self) -> None:
        if (plan := self._returns.replica_sums) is not None:
            self._totals = self._over_replicas(plan, [lists.sums for lists in self._returns.groups])
        if self._plan.shares is not None:
            self._share_with_all()

    def _over_replicas(self, plan: ReplicaSums, sums: Sequence[KeySums | None]) -> dict[int, RowGradients]:
        """Returns the sums over all sharding groups of the gradients that arrived."""
        use_here(*self._entries.values())
        own = {g: self._memory.sum_rows(self.entries_of(g), keys.entries) for g in plan.groups if (keys := sums[g])}

        def exchanged(message: Tensor, meanwhile: Callable[[], None]) -> AbstractContextManager[Tensor]:
            outgoing = Outgoing(message, self._memory.sealed(message))
            return self._exchanged(self._gradients_channel, outgoing, plan.sums_out, plan.sums_in, 0, meanwhile)

        return sum_over_replicas(plan, own, self._memory, self._codecs.gradients, exchanged)

    def _share_with_all(self) -> None:
        """Sends the sums of replicated tables."""
        shares = self._plan.shares
        assert shares is not None
        use_here(*self._entries.values())
        message = self._memory.empty_message(shares.sums_out.num_bytes[0])
        targets: dict[int, Tensor] = {}
        for g, lists in shares.groups.items():
            if g in self._totals:
                own = self._totals[g].values
            else:
                own = self._memory.sum_rows(self.entries_of(g), self._returns.groups[g].sums.entries)
            num_rows = len(lists.rows_in.places)
            targets[g] = self._memory.empty_rows(num_rows, lists.group.dim, lists.group.dtype)
            self._shared[g] = RowGradients(own, None, targets[g])
            PLAIN.write(self._memory, own, lists.rows_out.others(0), message, lists.rows_out.in_message(0))
        outgoing = Outgoing(message, self._memory.sealed(message))

        def meanwhile() -> None:
            for g, lists in shares.groups.items():
                places = lists.rows_out.own(0), lists.rows_in.own(0)
                self._memory.copy_rows(self._shared[g].values, places[0], targets[g], places[1])

        sizes = shares.sums_out, shares.sums_in
        with self._exchanged(self._gradients_channel, outgoing, *sizes, 0, meanwhile) as received:
            for g, lists in shares.groups.items():
                in_message, places = lists.rows_in.in_message(0), lists.rows_in.others(0)
                PLAIN.read(self._memory, received, in_message, targets[g], places)

    def sum_gradients(self) -> list[RowGradients | None]:
        known = self._totals | self._shared | self._with_bags
        return self._sums([lists.sums for lists in self._row_returns], known)

    def sum_late_gradients(self) -> list[RowGradients | None]:
        return self._sums([lists.late_sums for lists in self._row_returns], self._late_totals)

    def _sums(self, sums: Sequence[KeySums | None], known: Mapping[int, RowGradients]) -> list[RowGradients | None]:
        """Returns the sums, by group. known: those that were made when ranks exchanged them."""
        use_here(*self._entries.values())
        use_here(*(tensor for total in known.values() for tensor in (total.values, total.everywhere)))
        gradients: list[RowGradients | None] = []
        for g, (lists, keys) in enumerate(zip(self._row_returns, sums, strict=True)):
            if lists.group.frozen or keys is None:
                gradients.append(None)
            elif g in known:
                gradients.append(known[g])
            else:
                gradients.append(RowGradients(self._memory.sum_rows(self.entries_of(g), keys.entries), keys.keys))
        return gradients

    @contextmanager
    def _exchanged(
        self,
        channel: Channel,
        outgoing: Outgoing,
        sent: MessageSizes,
        arriving: MessageSizes,
        part: int,
        meanwhile: Callable[[], None],
    ) -> Iterator[Tensor]:
        """Sends a message to all ranks and yields the received one, which is valid within the context."""
        if outgoing.ready is not None:
            outgoing.ready.synchronize()
        received = self._memory.empty_message(arriving.num_bytes[part])
        sizes = sent.sizes[part], arriving.sizes[part]
        channel.all_to_all(outgoing.message, sizes[0], received, sizes[1], meanwhile)
        try:
            yield received
        finally:
            self._memory.consumed(received)


def _places_of(rows_out: TravelList, source: RowSource) -> TravelList:
    """Returns the places of the rows that an owner sends."""
    _, slots = source.sent_from()
    return rows_out if slots is None else rows_out.select(slots)
