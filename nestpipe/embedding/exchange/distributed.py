"""The exchange among several ranks: one message carries the rows of all groups and tables.

Rows are gathered into a message and copied from it to their places, without a temporary copy. A rank copies its own
rows while the message travels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.device.streams import Mark, use_here
from nestpipe.distributed import Channel, Notice
from nestpipe.embedding.dedup import BatchDedup, RequesterDedup
from nestpipe.embedding.exchange import sum_limit
from nestpipe.embedding.exchange.codec import PLAIN, Codec
from nestpipe.embedding.group import FeatureGroups
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.plan import GroupPlan, MessageSizes, Plan, TravelList, make_plan
from nestpipe.embedding.resident import ResidentRows
from nestpipe.embedding.route import Route, route_keys


class DistributedExchange:
    """See Exchange."""

    def __init__(self, route: Channel, rows: Channel, gradients: Channel, memory: Memory, codec: Codec = PLAIN) -> None:
        self.size = route.size
        self._route = route
        self._rows = rows
        self._gradients = gradients
        self._memory = memory
        self._codec = codec

    def route(self, batch: BatchDedup | Exception, features: FeatureGroups, notice: Notice) -> Route | None:
        return route_keys(batch, features, self._route, notice)

    def plan(self, route: Route, window: str) -> Plan | None:
        return make_plan(route, window, self._route.rank, self._codec.row_bytes)

    def agree(self, error: Exception | None) -> None:
        channel = self._route
        failed = channel.all_to_all_equal(torch.full((channel.size, 1), int(error is not None))).flatten()
        if bool(failed.any()):
            channel.raise_agreed(error, failed.nonzero().flatten().tolist())

    def open(self, route: Route, plan: Plan | None, resident: list[ResidentRows]) -> "DistributedBatch":
        assert plan is not None
        return DistributedBatch(route.batch, plan, resident, self._rows, self._gradients, self._memory, self._codec)


@dataclass(frozen=True)
class Outgoing:
    """A message that kernels may still be writing."""

    message: Tensor
    ready: Mark
    """Event that fires when the message is complete; None if stream order already guarantees it."""


class DistributedBatch:
    """See BatchExchange."""

    def __init__(
        self,
        batch: BatchDedup,
        plan: Plan,
        resident: list[ResidentRows],
        rows: Channel,
        gradients: Channel,
        memory: Memory,
        codec: Codec,
    ) -> None:
        self.row_bytes = self.gradient_bytes = 0
        self.exceeds = memory.new_flag()
        self._plan = plan
        self._rows_channel = rows
        self._gradients_channel = gradients
        self._memory = memory
        self._codec = codec
        self._num_micro_batches = batch.num_micro_batches
        limits = [sum_limit(dedup.group.dtype, rows.size, codec) for dedup in batch.groups]
        pairs = zip(batch.groups, limits, strict=True)
        self._requesters = [_Requester(dedup, plan.window, memory, limit) for dedup, limit in pairs]
        self._entries: dict[int, Tensor] = {}
        """Owner: gradient of each entry, by group."""
        self._sources = [rows.sent_from()[0] for rows in resident]
        """Owner: array of rows that are sent, by group."""
        self._sent = [_places_of(lists, rows) for lists, rows in zip(plan.groups, resident, strict=True)]
        """Owner: places in it of the rows that are sent, by group."""
        self._outgoing: dict[int, Outgoing] = {}
        """Rows that were written ahead, by micro-batch."""

    def send_rows(self, micro_batch: int) -> None:
        outgoing = self._outgoing.pop(micro_batch, None) or self._write_rows(micro_batch)
        targets = [requester.arriving(micro_batch) for requester in self._requesters]

        def meanwhile() -> None:
            # Rows are frozen, so the next message is written while this one travels. This thread then waits only once.
            if outgoing.ready is not None and micro_batch + 1 < self._num_micro_batches:
                self._outgoing[micro_batch + 1] = self._write_rows(micro_batch + 1)
            for g, target in enumerate(targets):
                slots, places = self._sent[g].own(micro_batch), self._plan.groups[g].rows_in.own(micro_batch)
                self._memory.copy_rows(self._sources[g], slots, target, places)

        self.row_bytes += self._plan.rows_out.row_bytes[micro_batch]
        sizes = self._plan.rows_out, self._plan.rows_in
        with self._exchanged(self._rows_channel, outgoing, *sizes, micro_batch, meanwhile) as received:
            for lists, requester, target in zip(self._plan.groups, self._requesters, targets, strict=True):
                in_message, places = lists.rows_in.in_message(micro_batch), lists.rows_in.others(micro_batch)
                self._codec.read(self._memory, received, in_message, target, places)
                requester.gather(micro_batch)

    def _write_rows(self, micro_batch: int) -> Outgoing:
        """Writes the rows that this owner sends to other ranks."""
        message = self._memory.empty_message(self._plan.rows_out.num_bytes[micro_batch])
        for source, sent in zip(self._sources, self._sent, strict=True):
            slots, in_message = sent.others(micro_batch), sent.in_message(micro_batch)
            self._codec.write(self._memory, source, slots, message, in_message)
        return Outgoing(message, self._memory.sealed(message))

    def rows(self, micro_batch: int) -> list[Tensor]:
        rows = [requester.pop_rows(micro_batch) for requester in self._requesters]
        use_here(*rows)
        return [r.requires_grad_(not lists.group.frozen) for r, lists in zip(rows, self._plan.groups, strict=True)]

    def return_gradients(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        use_here(*gradients)
        message = self._memory.empty_message(self._plan.gradients_out.num_bytes[micro_batch])
        sources: list[Tensor | None] = []
        for g, (lists, requester) in enumerate(zip(self._plan.groups, self._requesters, strict=True)):
            sources.append(None)
            if not lists.group.frozen:
                gradient = gradients[g] if len(gradients) > 0 else None
                collected = requester.collect(micro_batch, gradient, self.exceeds)
                returned = lists.gradients_out
                places, in_message = returned.others(micro_batch), returned.in_message(micro_batch)
                self._codec.write(self._memory, collected, places, message, in_message)
                sources[g] = collected
        outgoing = Outgoing(message, self._memory.sealed(message))

        def meanwhile() -> None:
            for g, source in enumerate(sources):
                if source is not None:
                    self._store_own(g, micro_batch, source)

        self.gradient_bytes += self._plan.gradients_out.row_bytes[micro_batch]
        sizes = self._plan.gradients_out, self._plan.gradients_in
        with self._exchanged(self._gradients_channel, outgoing, *sizes, micro_batch, meanwhile) as received:
            for g, source in enumerate(sources):
                if source is not None:
                    self._store_received(g, micro_batch, received)

    def _store_own(self, g: int, micro_batch: int, source: Tensor) -> None:
        lists = self._plan.groups[g]
        rows, entries = lists.gradients_out.own(micro_batch), lists.gradients_in.own(micro_batch)
        if self._plan.window == "once":
            self._memory.copy_rows(source, rows, self._entries_of(g), entries)
        else:
            own = self._memory.empty_rows(len(rows), lists.group.dim, lists.group.dtype)
            self._memory.copy_rows(source, rows, own, None)
            self._add_to_entries(g, entries, own)

    def _store_received(self, g: int, micro_batch: int, received: Tensor) -> None:
        lists = self._plan.groups[g]
        in_message, entries = lists.gradients_in.in_message(micro_batch), lists.gradients_in.others(micro_batch)
        if self._plan.window == "once":
            self._codec.read(self._memory, received, in_message, self._entries_of(g), entries)
        else:
            rows = self._memory.empty_rows(len(entries), lists.group.dim, lists.group.dtype)
            self._codec.read(self._memory, received, in_message, rows, None)
            self._add_to_entries(g, entries, rows)

    def _entries_of(self, g: int) -> Tensor:
        """Returns memory for the gradients of entries: uninitialised if each arrives once, zeros if they are resent."""
        if g not in self._entries:
            lists = self._plan.groups[g]
            entries = self._memory.empty_rows(lists.num_entries, lists.group.dim, lists.group.dtype)
            self._entries[g] = entries if self._plan.window == "once" else entries.zero_()
        return self._entries[g]

    def _add_to_entries(self, g: int, entries: Tensor, rows: Tensor) -> None:
        self._memory.add_rows(self._entries_of(g), entries, rows, None, torch.inf, None)

    def sum_gradients(self) -> list[Tensor | None]:
        use_here(*self._entries.values())
        sums: list[Tensor | None] = []
        for g, lists in enumerate(self._plan.groups):
            sums.append(None if lists.group.frozen else self._memory.sum_rows(self._entries_of(g), lists.sums))
        return sums

    @contextmanager
    def _exchanged(
        self,
        channel: Channel,
        outgoing: Outgoing,
        sent: MessageSizes,
        arriving: MessageSizes,
        micro_batch: int,
        meanwhile: Callable[[], None],
    ) -> Iterator[Tensor]:
        """Sends a message to all ranks and yields the received one, which is valid within the context."""
        if outgoing.ready is not None:
            outgoing.ready.synchronize()
        received = self._memory.empty_message(arriving.num_bytes[micro_batch])
        sizes = sent.sizes[micro_batch], arriving.sizes[micro_batch]
        channel.all_to_all(outgoing.message, sizes[0], received, sizes[1], meanwhile)
        try:
            yield received
        finally:
            self._memory.consumed(received)


def _places_of(lists: GroupPlan, resident: ResidentRows) -> TravelList:
    """Returns the places of the rows that an owner sends."""
    _, slots = resident.sent_from()
    return lists.rows_out if slots is None else lists.rows_out.select(slots)


class _Requester:
    """One group on the requester: received rows and summed gradients."""

    def __init__(self, dedup: RequesterDedup, window: str, memory: Memory, limit: float) -> None:
        self._dedup = dedup
        self._resends = window == "resend"
        self._memory = memory
        self._is_split = len(dedup.row_offsets) > 2
        self._limit = limit
        self._rows: dict[int, Tensor] = {}
        """Rows by micro-batch, until its dense part begins."""
        self._kept: Tensor | None = None
        """Rows received so far, by position."""
        self._sums: Tensor | None = None
        """Gradients summed so far, by position."""

    def arriving(self, micro_batch: int) -> Tensor:
        """Returns the memory for the arriving rows of a micro-batch. A single micro-batch needs no other copy."""
        if not self._is_split:
            self._rows[micro_batch] = self._empty(self._dedup.num_rows(micro_batch))
            return self._rows[micro_batch]
        if self._kept is None:
            self._kept = self._empty(len(self._dedup.keys))
        return self._kept

    def gather(self, micro_batch: int) -> None:
        """Gathers the rows of a micro-batch from those that arrived with it or earlier."""
        if self._kept is not None:
            self._rows[micro_batch] = rows = self._empty(self._dedup.num_rows(micro_batch))
            self._memory.copy_rows(self._kept, self._positions(micro_batch), rows, None)

    def pop_rows(self, micro_batch: int) -> Tensor:
        return self._rows.pop(micro_batch)

    def collect(self, micro_batch: int, gradient: Tensor | None, exceeds: Tensor) -> Tensor:
        """Adds a micro-batch's gradient to the sums, and returns the array from which gradients are sent."""
        if gradient is None:
            gradient = self._empty(self._dedup.num_rows(micro_batch)).zero_()
        if not self._is_split:
            self._memory.check_rows(gradient, self._limit, exceeds)
            return gradient
        if self._sums is None:
            self._sums = self._empty(len(self._dedup.keys))
        positions, is_first = self._positions(micro_batch), self._dedup.is_first[self._dedup.rows_of(micro_batch)]
        self._memory.add_rows(self._sums, positions, gradient, is_first, self._limit, exceeds)
        return self._by_position(positions, gradient) if self._resends else self._sums

    def _by_position(self, positions: Tensor, gradient: Tensor) -> Tensor:
        rows = self._empty(len(self._dedup.keys))
        self._memory.copy_rows(gradient, None, rows, positions)
        return rows

    def _positions(self, micro_batch: int) -> Tensor:
        return self._dedup.row_positions[self._dedup.rows_of(micro_batch)]

    def _empty(self, num_rows: int) -> Tensor:
        return self._memory.empty_rows(num_rows, self._dedup.group.dim, self._dedup.group.dtype)
