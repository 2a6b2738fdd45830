"""The frozen window of a batch: rows go out to the requesters, gradients come back, and no row changes in between.

Once (the default): a row travels with the first micro-batch that uses it and is kept by the requester; its gradient is
summed there and travels after the last one. Resend: both travel with every micro-batch that uses the row. The order of
summation is the same: a requester's micro-batches 0, 1, ..., then the requesters in order of rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.distributed import Channel
from nestpipe.embedding.buffer import Buffer
from nestpipe.embedding.request import TableRequest
from nestpipe.embedding.route import OwnedTable, Route

WINDOWS = ("once", "resend")


@dataclass(frozen=True)
class Plan:
    """Which keys of a list travel with each micro-batch; both ends make the same one from the keys' uses."""

    bring: list[Tensor]
    take: list[Tensor]

    @staticmethod
    def of(uses: Tensor, window: str, frozen: bool) -> "Plan":
        num_micro_batches = uses.shape[1]
        none = torch.empty(0, dtype=torch.int64)
        if window == "resend":
            bring = take = [_where(uses[:, i]) for i in range(num_micro_batches)]
        else:
            first = uses.int().argmax(1)
            last = num_micro_batches - 1 - uses.flip(1).int().argmax(1)
            bring = [_where(first == i) for i in range(num_micro_batches)]
            take = [_where(last == i) for i in range(num_micro_batches)]
        return Plan(bring, [none] * num_micro_batches if frozen else take)


class RequesterTable:
    """One table on the requester: rows it has been sent, gradients it has summed."""

    def __init__(self, request: TableRequest, window: str) -> None:
        self.request = request
        self.plan = Plan.of(request.uses, window, request.table.frozen)
        self.keeps = window == "once"
        shape = (len(request.keys), request.table.dim)
        self.rows = torch.zeros(shape, dtype=request.table.dtype)
        self.gradients = torch.zeros(shape, dtype=request.table.dtype)
        self.ends = torch.tensor(request.counts).cumsum(0)

    def counts(self, positions: Tensor) -> list[int]:
        """How many of these ascending positions each owner has."""
        ends = torch.searchsorted(positions, self.ends)
        return ends.diff(prepend=ends.new_zeros(1)).tolist()

    def leaf(self, micro_batch: int) -> Tensor:
        """A fresh gather of the micro-batch's distinct rows, in which its gradient will arrive."""
        rows = self.rows.index_select(0, self.request.leaves[micro_batch])
        return rows.requires_grad_(not self.request.table.frozen)

    def add_gradient(self, micro_batch: int, gradient: Tensor | None) -> None:
        if not self.keeps:
            self.gradients.zero_()
        if gradient is not None:
            self.gradients.index_add_(0, self.request.leaves[micro_batch], gradient)


class OwnerTable:
    """One table on the owner: frozen rows, and a slot of gradient for each (requester, key)."""

    def __init__(self, owned: OwnedTable, buffer: Buffer, window: str) -> None:
        self.owned = owned
        self.buffer = buffer
        self.plans = [Plan.of(uses, window, owned.table.frozen) for uses in owned.uses]
        self.slot_gradients = [
            torch.zeros(len(slots), owned.table.dim, dtype=owned.table.dtype) for slots in owned.slots
        ]

    def rows_for(self, requester: int, micro_batch: int) -> Tensor:
        slots = self.owned.slots[requester][self.plans[requester].bring[micro_batch]]
        return self.buffer.rows.index_select(0, slots)

    def gradient(self) -> Tensor:
        """Of each slot: the requesters' in order of rank. A requester has a key once, so no order is left open."""
        total = torch.zeros(len(self.owned.keys), self.owned.table.dim, dtype=self.owned.table.dtype)
        for slots, gradients in zip(self.owned.slots, self.slot_gradients, strict=True):
            total.index_add_(0, slots, gradients)
        return total


class Window:
    """All tables of one batch."""

    def __init__(
        self, route: Route, buffers: list[Buffer], rows: Channel, gradients: Channel, window: str = "once"
    ) -> None:
        self.rows_channel = rows
        self.gradients_channel = gradients
        self.rank, self.size = rows.rank, rows.size
        self.requester = [RequesterTable(request, window) for request in route.request.tables]
        self.owner = [OwnerTable(owned, b, window) for owned, b in zip(route.owned, buffers, strict=True)]
        self.row_bytes = 0
        self.gradient_bytes = 0

    def bring(self, micro_batch: int) -> None:
        """Exchange: rows from owners to requesters."""
        sent = [[table.rows_for(rank, micro_batch) for table in self.owner] for rank in range(self.size)]
        positions = [table.plan.bring[micro_batch] for table in self.requester]
        counts = [table.counts(p) for table, p in zip(self.requester, positions, strict=True)]
        received, num_bytes = self._exchange(self.rows_channel, sent, counts)
        self.row_bytes += num_bytes
        for table, p, rows in zip(self.requester, positions, received, strict=True):
            table.rows.index_copy_(0, p, rows)

    def leaves(self, micro_batch: int) -> dict[str, Tensor]:
        """By table: a fresh gather of the micro-batch's distinct rows."""
        return {table.request.table.name: table.leaf(micro_batch) for table in self.requester}

    def take(self, micro_batch: int, gradients: dict[str, Tensor | None]) -> None:
        """Gradient return: from requesters to owners."""
        sent: list[list[Tensor]] = [[] for _ in range(self.size)]
        for table in self.requester:
            table.add_gradient(micro_batch, gradients[table.request.table.name])
            positions = table.plan.take[micro_batch]
            parts = table.gradients.index_select(0, positions).split(table.counts(positions))
            for rank, part in enumerate(parts):
                sent[rank].append(part)
        takes = [[plan.take[micro_batch] for plan in table.plans] for table in self.owner]
        received, num_bytes = self._exchange(
            self.gradients_channel, sent, [[len(p) for p in of_table] for of_table in takes]
        )
        self.gradient_bytes += num_bytes
        for owner, of_table, rows in zip(self.owner, takes, received, strict=True):
            returned = rows.split([len(p) for p in of_table])
            for slots, p, part in zip(owner.slot_gradients, of_table, returned, strict=True):
                slots.index_add_(0, p, part)

    def gradients(self) -> list[Tensor | None]:
        """Of each table's slots, for the whole global batch; None for a frozen table."""
        return [None if table.owned.table.frozen else table.gradient() for table in self.owner]

    def _exchange(
        self, channel: Channel, sent: list[list[Tensor]], counts: list[list[int]]
    ) -> tuple[list[Tensor], int]:
        """sent[rank][table] rows; counts[table][rank] rows come back. One flat exchange carries all tables.

        Returns the rows of each table, in order of rank, and the bytes sent to other ranks.
        """
        tables = [table.owned.table for table in self.owner]
        parts = [torch.cat([rows.flatten().view(torch.uint8) for rows in of_rank]) for of_rank in sent]
        row_bytes = [table.dim * table.dtype.itemsize for table in tables]
        sizes = [
            [of_table[rank] * b for of_table, b in zip(counts, row_bytes, strict=True)] for rank in range(self.size)
        ]
        received = channel.all_to_all(parts, [sum(of_rank) for of_rank in sizes])
        pieces = [message.split(of_rank) for message, of_rank in zip(received, sizes, strict=True)]
        rows = [
            torch.cat([of_rank[t] for of_rank in pieces]).view(table.dtype).view(-1, table.dim)
            for t, table in enumerate(tables)
        ]
        return rows, sum(part.numel() for rank, part in enumerate(parts) if rank != self.rank)


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten()
