"""The frozen window of a batch: rows go out to the requesters, gradients come back, and no row changes in between.

Once (the default): a row travels with the first micro-batch that uses it and is kept by the requester; its gradient is
summed there and travels after the last one. Resend: both travel with every micro-batch that uses the row. The order of
summation is the same: a requester's micro-batches 0, 1, ..., then the requesters in order of rank.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from nestpipe.distributed import Channel
from nestpipe.embedding.buffer import Buffer
from nestpipe.embedding.memory import recycled
from nestpipe.embedding.plan import Places, Plan, Plans
from nestpipe.embedding.request import TableRequest
from nestpipe.embedding.route import OwnedTable, Route


class RequesterTable:
    """One table on the requester: rows it has been sent, gradients it has summed."""

    def __init__(self, request: TableRequest, plan: Plan, window: str) -> None:
        self.request = request
        self.plan = plan
        self.keeps = window == "once"
        self.shape = (len(request.keys), request.table.dim)
        self._sent: dict[int, Tensor] = {}
        """by micro-batch; when rows are not kept"""

    @cached_property
    def rows(self) -> Tensor:
        """by position; where no row was brought yet, anything"""
        return recycled.empty(self.shape, self.request.table.dtype)

    @cached_property
    def gradients(self) -> Tensor:
        return recycled.empty(self.shape, self.request.table.dtype).zero_()

    def counts(self, positions: Places) -> list[int]:
        """How many of these positions each owner has."""
        if positions is None:
            return self.request.counts
        ends = torch.searchsorted(positions, torch.tensor(self.request.counts).cumsum(0))
        return ends.diff(prepend=ends.new_zeros(1)).tolist()

    def put(self, micro_batch: int, rows: Tensor) -> None:
        """Rows that were brought, by position. All at once are not copied: they may be the owner's own memory."""
        positions = self.plan.bring[micro_batch]
        if not self.keeps:
            self._sent[micro_batch] = rows
        elif positions is None:
            self.rows = rows
        else:
            self.rows.index_copy_(0, positions, rows)

    def leaf(self, micro_batch: int) -> Tensor:
        """A fresh gather of the micro-batch's distinct rows, in which its gradient will arrive."""
        positions = self.request.leaves[micro_batch]
        leaf = recycled.empty((len(positions), self.request.table.dim), self.request.table.dtype)
        if self.keeps:
            torch.index_select(self.rows, 0, positions, out=leaf)
        else:
            leaf.copy_(self._sent.pop(micro_batch))  # what was sent is what the micro-batch uses, in the same order
        return leaf.requires_grad_(not self.request.table.frozen)

    def returned(self, micro_batch: int, gradient: Tensor | None) -> Tensor:
        """Adds a leaf's gradient; what is to be taken now, by position."""
        positions = self.plan.take[micro_batch]
        if positions is None and gradient is not None:
            return gradient  # of the only micro-batch: there is nothing to add it to
        if not self.keeps:
            self.gradients.zero_()
        if gradient is not None:
            self.gradients.index_add_(0, self.request.leaves[micro_batch], gradient)
        return self.gradients if positions is None else self.gradients.index_select(0, positions)


class OwnerTable:
    """One table on the owner: frozen rows, and a slot of gradient for each (requester, key)."""

    def __init__(self, owned: OwnedTable, plans: list[Plan], buffer: Buffer) -> None:
        self.owned = owned
        self.plans = plans
        self.buffer = buffer
        self._slot_gradients: dict[int, Tensor] = {}

    def rows_for(self, requester: int, micro_batch: int) -> Tensor:
        slots, places = self.owned.slots[requester], self.plans[requester].bring[micro_batch]
        if places is None and requester == 0:
            return self.buffer.frozen_rows[: len(slots)]  # its keys have the first slots, in order
        return self.buffer.frozen_rows.index_select(0, slots if places is None else slots[places])

    def num_taken(self, requester: int, micro_batch: int) -> int:
        places = self.plans[requester].take[micro_batch]
        return len(self.owned.slots[requester] if places is None else places)

    def add(self, requester: int, micro_batch: int, gradients: Tensor) -> None:
        """To the requester's slots."""
        places = self.plans[requester].take[micro_batch]
        if places is None:
            self._slot_gradients[requester] = gradients
        else:
            self.slot_gradients(requester).index_add_(0, places, gradients)

    def slot_gradients(self, requester: int) -> Tensor:
        """[its keys, dim], zeros at first."""
        if requester not in self._slot_gradients:
            shape = (len(self.owned.slots[requester]), self.owned.table.dim)
            self._slot_gradients[requester] = torch.zeros(shape, dtype=self.owned.table.dtype)
        return self._slot_gradients[requester]

    def gradient(self) -> Tensor:
        """Of each slot: the requesters' in order of rank. A requester has a key once, so no order is left open."""
        if len(self.owned.slots) == 1:
            return self.slot_gradients(0)
        total = torch.zeros(len(self.owned.keys), self.owned.table.dim, dtype=self.owned.table.dtype)
        for requester, slots in enumerate(self.owned.slots):
            total.index_add_(0, slots, self.slot_gradients(requester))
        return total


class Window:
    """All tables of one batch."""

    def __init__(
        self, route: Route, buffers: list[Buffer], rows: Channel, gradients: Channel, plans: Plans | None = None
    ) -> None:
        """The plans may have been made before, when nobody waited; else rows travel once."""
        plans = plans if plans is not None else Plans.of(route, "once")
        self.rows_channel = rows
        self.gradients_channel = gradients
        self.rank, self.size = rows.rank, rows.size
        self.requester, self.owner = [], []
        for request, owned, buffer, plan in zip(route.request.tables, route.owned, buffers, plans.tables, strict=True):
            self.requester.append(RequesterTable(request, plan.requester, plans.window))
            self.owner.append(OwnerTable(owned, plan.owner, buffer))
        self.row_bytes = 0
        self.gradient_bytes = 0

    def bring(self, micro_batch: int) -> None:
        """Exchange: rows from owners to requesters."""
        sent = [[table.rows_for(rank, micro_batch) for table in self.owner] for rank in range(self.size)]
        counts = [table.counts(table.plan.bring[micro_batch]) for table in self.requester]
        received, num_bytes = self._exchange(self.rows_channel, sent, counts)
        self.row_bytes += num_bytes
        for table, rows in zip(self.requester, received, strict=True):
            table.put(micro_batch, rows)

    def leaves(self, micro_batch: int) -> dict[str, Tensor]:
        """By table, once the micro-batch has been brought: its distinct rows, gathered afresh."""
        return {table.request.table.name: table.leaf(micro_batch) for table in self.requester}

    def take(self, micro_batch: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Gradient return: from requesters to owners. By table; a leaf without gradient may be left out."""
        sent: list[list[Tensor]] = [[] for _ in range(self.size)]
        for table in self.requester:
            rows = table.returned(micro_batch, gradients.get(table.request.table.name))
            for rank, part in enumerate(rows.split(table.counts(table.plan.take[micro_batch]))):
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
        return [None if table.owned.table.frozen else table.gradient() for table in self.owner]

    def _exchange(
        self, channel: Channel, sent: list[list[Tensor]], counts: list[list[int]]
    ) -> tuple[list[Tensor], int]:
        """sent[rank][table] rows; counts[table][rank] rows come back. One flat exchange carries all tables.

        Returns the rows of each table, in order of rank, and the bytes sent to other ranks. What this rank sends to
        itself is not made into bytes.
        """
        own = sent[self.rank]
        if self.size == 1:
            return own, 0
        tables = [table.owned.table for table in self.owner]
        others = [rank for rank in range(self.size) if rank != self.rank]
        parts = [torch.empty(0, dtype=torch.uint8)] * self.size
        sizes = [[0] * len(tables)] * self.size
        for rank in others:
            parts[rank] = torch.cat([_bytes(rows) for rows in sent[rank]])
            sizes[rank] = [
                of_table[rank] * table.dim * table.dtype.itemsize
                for of_table, table in zip(counts, tables, strict=True)
            ]
        messages = channel.all_to_all(parts, [sum(of_rank) for of_rank in sizes])
        received = [
            torch.empty(sum(of_table), table.dim, dtype=table.dtype)
            for of_table, table in zip(counts, tables, strict=True)
        ]
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
