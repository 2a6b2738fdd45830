"""The frozen window of a batch: rows go out to the requesters, gradients come back, and no row changes in between.

Once (the default): a row travels with the first micro-batch that uses it and is kept by the requester; its gradient is
summed there and travels after the last one. Resend: both travel with every micro-batch that uses the row. The order of
summation is the same: a requester's micro-batches 0, 1, ..., then the requesters in order of rank. In a world of one
nothing travels: see local_window.py.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from nestpipe.device.streams import use_here
from nestpipe.device.tally import embedding_memory
from nestpipe.distributed import Channel
from nestpipe.embedding.buffer import Buffer
from nestpipe.embedding.local_window import LocalWindow
from nestpipe.embedding.plan import Plans, TablePlans
from nestpipe.embedding.request import TableRequest
from nestpipe.embedding.route import Route
from nestpipe.embedding.rows import add_rows, empty_rows, put_rows, take_rows


class RequesterTable:
    """One table on the requester: rows it has been sent, gradients it has summed."""

    def __init__(self, request: TableRequest, plans: TablePlans, window: str, device: torch.device) -> None:
        self.request = request
        self.plans = plans
        self.keeps = window == "once"
        self.shape = (len(request.keys), request.table.dim)
        self.device = device
        self._leaves: dict[int, Tensor] = {}
        """by micro-batch, until its dense part begins"""

    @cached_property
    def rows(self) -> Tensor:
        """by position; where no row was brought yet, anything"""
        return empty_rows(self.shape, self.request.table.dtype, self.device)

    @cached_property
    def gradients(self) -> Tensor:
        return empty_rows(self.shape, self.request.table.dtype, self.device).zero_()

    def put(self, micro_batch: int, rows: Tensor) -> None:
        """Rows that were brought, by position; from them, and from those of earlier micro-batches, the leaf."""
        positions = self.plans.requester.bring[micro_batch]
        if not self.keeps and positions is not None:
            self._leaves[micro_batch] = rows  # what the micro-batch uses, in the same order, in memory of its own
            return
        if positions is None:
            self.rows = rows
        else:
            put_rows(self.rows, positions, rows)
        self._leaves[micro_batch] = take_rows(self.rows, self.request.leaves[micro_batch])

    def leaf(self, micro_batch: int) -> Tensor:
        """The micro-batch's distinct rows, gathered afresh when they were brought; its gradient will arrive in it."""
        leaf = self._leaves.pop(micro_batch)
        use_here(leaf)
        return leaf.requires_grad_(not self.request.table.frozen)

    def returned(self, micro_batch: int, gradient: Tensor | None) -> Tensor:
        """Adds a leaf's gradient; what is to be taken now, by position."""
        positions = self.plans.requester.take[micro_batch]
        if positions is None and gradient is not None:
            return gradient  # of the only micro-batch: there is nothing to add it to
        if not self.keeps:
            self.gradients.zero_()
        if gradient is not None:
            add_rows(self.gradients, self.request.leaves[micro_batch], gradient)
        return self.gradients if positions is None else take_rows(self.gradients, positions)


class OwnerTable:
    """One table on the owner: frozen rows, and a slot of gradient for each (requester, key)."""

    def __init__(self, plans: TablePlans, buffer: Buffer) -> None:
        self.plans = plans
        self.buffer = buffer
        self.table = buffer.table
        self._slot_gradients: dict[int, Tensor] = {}

    def rows_for(self, requester: int, micro_batch: int) -> Tensor:
        slots, places = self.plans.slots[requester], self.plans.owner[requester].bring[micro_batch]
        if places is None and requester == 0:
            return self.buffer.frozen_rows[: len(slots)]  # its keys have the first slots, in order
        return take_rows(self.buffer.frozen_rows, slots if places is None else slots.index_select(0, places))

    def num_taken(self, requester: int, micro_batch: int) -> int:
        places = self.plans.owner[requester].take[micro_batch]
        return len(self.plans.slots[requester] if places is None else places)

    def add(self, requester: int, micro_batch: int, gradients: Tensor) -> None:
        """To the requester's slots."""
        places = self.plans.owner[requester].take[micro_batch]
        if places is None:
            self._slot_gradients[requester] = gradients
        else:
            add_rows(self.slot_gradients(requester), places, gradients)

    def slot_gradients(self, requester: int) -> Tensor:
        """[its keys, dim], zeros at first."""
        if requester not in self._slot_gradients:
            self._slot_gradients[requester] = self._zeros(len(self.plans.slots[requester]))
        return self._slot_gradients[requester]

    def gradient(self) -> Tensor:
        """Of each slot: the requesters' in order of rank. A requester has a key once, so no order is left open."""
        total = self._zeros(len(self.buffer.keys))
        for requester, slots in enumerate(self.plans.slots):
            gradients = self.slot_gradients(requester)
            use_here(gradients)
            add_rows(total, slots, gradients)
        return total

    def _zeros(self, num_rows: int) -> Tensor:
        zeros = torch.zeros(num_rows, self.table.dim, dtype=self.table.dtype, device=self.buffer.records.device)
        embedding_memory.add(zeros)
        return zeros


def open_window(
    route: Route, buffers: list[Buffer], rows: Channel, gradients: Channel, plans: Plans | None = None
) -> "Window | LocalWindow":
    """The plans may have been made before, when nobody waited; else rows travel once."""
    if rows.size == 1:
        return LocalWindow(route.request, buffers)
    return Window(route, buffers, rows, gradients, plans if plans is not None else Plans.of(route, "once"))


class Window:
    """All tables of one batch."""

    def __init__(self, route: Route, buffers: list[Buffer], rows: Channel, gradients: Channel, plans: Plans) -> None:
        self.rows_channel = rows
        self.gradients_channel = gradients
        self.rank, self.size = rows.rank, rows.size
        self.buffers = buffers
        self.requester, self.owner = [], []
        for request, buffer, of_table in zip(route.request.tables, buffers, plans.tables, strict=True):
            self.requester.append(RequesterTable(request, of_table, plans.window, buffer.records.device))
            self.owner.append(OwnerTable(of_table, buffer))
        self.row_bytes = 0
        self.gradient_bytes = 0

    def bring(self, micro_batch: int) -> None:
        """Exchange: rows from owners to requesters."""
        sent = [[table.rows_for(rank, micro_batch) for table in self.owner] for rank in range(self.size)]
        counts = [table.plans.bring_counts[micro_batch] for table in self.requester]
        received, num_bytes = self._exchange(self.rows_channel, sent, counts)
        self.row_bytes += num_bytes
        for table, rows in zip(self.requester, received, strict=True):
            table.put(micro_batch, rows)

    def leaves(self, micro_batch: int) -> dict[str, Tensor]:
        """By table, once the micro-batch has been brought: its distinct rows. Each is asked for once."""
        return {table.request.table.name: table.leaf(micro_batch) for table in self.requester}

    def take(self, micro_batch: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Gradient return: from requesters to owners. By table; a leaf without gradient may be left out."""
        use_here(*gradients.values())
        sent: list[list[Tensor]] = [[] for _ in range(self.size)]
        for table in self.requester:
            rows = table.returned(micro_batch, gradients.get(table.request.table.name))
            for rank, part in enumerate(rows.split(table.plans.take_counts[micro_batch])):
                sent[rank].append(part)
        ranks = range(self.size)
        counts = [[table.num_taken(rank, micro_batch) for rank in ranks] for table in self.owner]
        received, num_bytes = self._exchange(self.gradients_channel, sent, counts)
        self.gradient_bytes += num_bytes
        for owner, of_table, rows in zip(self.owner, counts, received, strict=True):
            for rank, part in enumerate(rows.split(of_table)):
                owner.add(rank, micro_batch, part)

    def gradients(self) -> list[Tensor | None]:
        """Of each table's slots, for the whole global batch; None for a frozen table."""
        return [None if table.table.frozen else table.gradient() for table in self.owner]

    def are_finite(self) -> list[Tensor | None]:
        """Whether each table's gradients are, one bool on the device; None: that is not known yet."""
        return [None for _ in self.owner]

    def _exchange(
        self, channel: Channel, sent: list[list[Tensor]], counts: list[list[int]]
    ) -> tuple[list[Tensor], int]:
        """sent[rank][table] rows; counts[table][rank] rows come back. One flat exchange carries all tables.

        Returns the rows of each table, in order of rank, and the bytes sent to other ranks. What this rank sends to
        itself is not made into bytes.
        """
        own, device = sent[self.rank], self.requester[0].device
        tables = [table.table for table in self.owner]
        others = [rank for rank in range(self.size) if rank != self.rank]
        parts = [torch.empty(0, dtype=torch.uint8, device=device)] * self.size
        sizes = [[0] * len(tables)] * self.size
        for rank in others:
            parts[rank] = torch.cat([_bytes(rows) for rows in sent[rank]])
            sizes[rank] = [
                of_table[rank] * table.dim * table.dtype.itemsize
                for of_table, table in zip(counts, tables, strict=True)
            ]
        embedding_memory.add(*parts)
        messages = channel.all_to_all(parts, [sum(of_rank) for of_rank in sizes])
        received = [
            torch.empty(sum(of_table), table.dim, dtype=table.dtype, device=device)
            for of_table, table in zip(counts, tables, strict=True)
        ]
        embedding_memory.add(*received)
        pieces = [message.split(of_rank) for message, of_rank in zip(messages, sizes, strict=True)]
        for t, rows in enumerate(received):
            for rank, part in enumerate(rows.split(counts[t])):
                if rank == self.rank:
                    part.copy_(own[t])
                else:
                    _bytes(part).copy_(pieces[rank][t])
        return received, sum(part.numel() for part in parts)


def _bytes(rows: Tensor) -> Tensor:
    return rows.flatten().view(torch.uint8)
