"""The frozen window of a batch: rows go out to the requesters, gradients come back, and no row changes in between.

Once (the default): a row travels with the first micro-batch that uses it and is kept by the requester; its gradient is
summed there and travels after the last one. Resend: both travel with every micro-batch that uses the row. The order of
summation is the same: a requester's micro-batches 0, 1, ..., then the requesters in order of rank. In a world of one
nothing travels: see local_window.py.

Rows are gathered into a message and put in their places from it, without a copy in between; a rank's own, while gloo
carries the message. Where what is on a device passes through host memory, the device's kernels reach for it there:
copies would stand behind those of whole buffers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nestpipe.device.streams import Mark, is_accelerator, mark, use_here
from nestpipe.distributed import Channel
from nestpipe.embedding.buffer import Buffer
from nestpipe.embedding.layout import Layout
from nestpipe.embedding.local_window import LocalWindow
from nestpipe.embedding.plan import Places, Plans, TablePlans
from nestpipe.embedding.request import TableRequest
from nestpipe.embedding.route import Route
from nestpipe.embedding.rows import add_rows, copy_rows, empty_rows, take_rows
from nestpipe.kernels.keep_alive import keep_alive_until


class RequesterTable:
    """One table on the requester: rows it has been sent, gradients it has summed."""

    def __init__(self, request: TableRequest, plans: TablePlans, window: str, device: torch.device) -> None:
        self.request = request
        self.plans = plans
        self.keeps = window == "once"
        self.device = device
        self._leaves: dict[int, Tensor] = {}
        """by micro-batch, until its dense part begins"""

    @cached_property
    def rows(self) -> Tensor:
        """by position; where no row was brought yet, anything"""
        return self._empty(len(self.request.keys))

    @cached_property
    def gradients(self) -> Tensor:
        return self._empty(len(self.request.keys)).zero_()

    def arriving(self, micro_batch: int) -> list[tuple[Tensor, Places]]:
        """Where the rows that a micro-batch is brought are to be put, rank by rank: rows, and which of them."""
        positions, counts = self.plans.requester.bring[micro_batch], self.plans.bring_counts[micro_batch]
        if self.keeps and positions is not None:
            return list(_split(self.rows, positions, counts))
        self._leaves[micro_batch] = leaf = self._empty(sum(counts))  # they are what it uses, in the same order
        return list(_split(leaf, None, counts))

    def gather(self, micro_batch: int) -> None:
        """When they have been put: the leaf, from them and from those of earlier micro-batches."""
        if micro_batch not in self._leaves:
            self._leaves[micro_batch] = take_rows(self.rows, self.request.leaves[micro_batch])

    def leaf(self, micro_batch: int) -> Tensor:
        """The micro-batch's distinct rows, in memory of their own since they were brought; its gradient will arrive in
        it."""
        leaf = self._leaves.pop(micro_batch)
        use_here(leaf)
        return leaf.requires_grad_(not self.request.table.frozen)

    def returned(self, micro_batch: int, gradient: Tensor | None) -> Iterator[tuple[Tensor, Places]]:
        """Adds a leaf's gradient; what is to be taken now, rank by rank: rows, and which of them."""
        rows, positions = self._gradients_after(micro_batch, gradient)
        return _split(rows, positions, self.plans.take_counts[micro_batch])

    def _gradients_after(self, micro_batch: int, gradient: Tensor | None) -> tuple[Tensor, Places]:
        positions = self.plans.requester.take[micro_batch]
        if self.request.table.frozen:
            return self._empty(0), positions
        if positions is None and gradient is not None:
            return gradient, None  # of the only micro-batch: there is nothing to add it to
        if not self.keeps:
            self.gradients.zero_()
        if gradient is not None:
            add_rows(self.gradients, self.request.leaves[micro_batch], gradient)
        return self.gradients, positions

    def _empty(self, num_rows: int) -> Tensor:
        return empty_rows((num_rows, self.request.table.dim), self.request.table.dtype, self.device)


def _split(rows: Tensor, places: Places, counts: list[int]) -> Iterator[tuple[Tensor, Places]]:
    """So many of the places for each rank, of all rows; or without places, as many rows."""
    if places is None:
        return ((of_rank, None) for of_rank in rows.split(counts))
    return ((rows, of_rank) for of_rank in places.split(counts))


class OwnerTable:
    """One table on the owner: frozen rows, and a slot of gradient for each (requester, key)."""

    def __init__(self, plans: TablePlans, buffer: Buffer) -> None:
        self.plans = plans
        self.buffer = buffer
        self.table = buffer.table
        self._slot_gradients: dict[int, Tensor] = {}

    def num_brought(self, requester: int, micro_batch: int) -> int:
        return len(self.plans.bring_slots[requester][micro_batch])

    def num_taken(self, requester: int, micro_batch: int) -> int:
        places = self.plans.take_places[requester][micro_batch]
        return len(self.plans.slots[requester] if places is None else places)

    def give(self, requester: int, micro_batch: int, out: Tensor) -> None:
        """Rows for another rank."""
        copy_rows(self.buffer.frozen_rows, self.plans.bring_slots[requester][micro_batch], out, None)

    def put_own(self, rank: int, micro_batch: int, target: Tensor, places: Places) -> None:
        """Rows for this rank itself."""
        copy_rows(self.buffer.frozen_rows, self.plans.bring_slots[rank][micro_batch], target, places)

    def add(self, requester: int, micro_batch: int, gradients: Tensor) -> None:
        """To the requester's slots."""
        places = self.plans.take_places[requester][micro_batch]
        if places is not None:
            add_rows(self.slot_gradients(requester), places, gradients)
        elif gradients.device == self.buffer.records.device:
            self._slot_gradients[requester] = gradients
        else:
            self._slot_gradients[requester] = slots = self._empty(len(gradients))
            copy_rows(gradients, None, slots, None)

    def slot_gradients(self, requester: int) -> Tensor:
        """[its keys, dim], zeros at first."""
        if requester not in self._slot_gradients:
            self._slot_gradients[requester] = self._empty(len(self.plans.slots[requester])).zero_()
        return self._slot_gradients[requester]

    def gradient(self) -> Tensor:
        """Of each slot: the requesters' in order of rank. A requester has a key once, so no order is left open."""
        total = self._empty(len(self.buffer.keys)).zero_()
        for requester, slots in enumerate(self.plans.slots):
            gradients = self.slot_gradients(requester)
            use_here(gradients)
            add_rows(total, slots, gradients)
        return total

    def _empty(self, num_rows: int) -> Tensor:
        return empty_rows((num_rows, self.table.dim), self.table.dtype, self.buffer.records.device)


def open_window(
    route: Route, buffers: list[Buffer], rows: Channel, gradients: Channel, plans: Plans | None = None
) -> "Window | LocalWindow":
    """The plans may have been made before, when nobody waited; else rows travel once."""
    if rows.size == 1:
        return LocalWindow(route.request, buffers)
    return Window(route, buffers, rows, gradients, plans if plans is not None else Plans.of(route, "once"))


@dataclass(frozen=True)
class Outgoing:
    """A message that kernels are writing."""

    message: Tensor
    layout: Layout
    moment: Mark
    """when they have; None: it is where only what comes after them in their stream can read it, or there are none"""


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
        self._num_micro_batches = len(route.request.num_samples)
        self._tables = [buffer.table for buffer in buffers]
        self._device = buffers[0].records.device
        self._is_staged = is_accelerator(self._device) and rows.is_staged
        self._outgoing: dict[int, Outgoing] = {}

    def bring(self, micro_batch: int) -> None:
        """Exchange: rows from owners to requesters."""
        outgoing = self._outgoing.pop(micro_batch) if micro_batch in self._outgoing else self._give(micro_batch)
        places = [table.arriving(micro_batch) for table in self.requester]

        def meanwhile() -> None:
            # Rows are frozen. While these travel the next are given, so that this thread waits for its device once.
            if self._is_staged and micro_batch + 1 < self._num_micro_batches:
                self._outgoing[micro_batch + 1] = self._give(micro_batch + 1)
            for owner, of_ranks in zip(self.owner, places, strict=True):
                owner.put_own(self.rank, micro_batch, *of_ranks[self.rank])

        self.row_bytes += outgoing.layout.num_row_bytes
        counts = [table.plans.bring_counts[micro_batch] for table in self.requester]
        with self._exchanged(self.rows_channel, outgoing, counts, meanwhile) as received:
            for table, of_ranks, of_others in zip(self.requester, places, received, strict=True):
                for rank, rows in of_others.items():
                    copy_rows(rows, None, *of_ranks[rank])
                table.gather(micro_batch)

    def _give(self, micro_batch: int) -> Outgoing:
        """The rows of this owner, for other ranks."""
        ranks = range(self.size)
        counts = [[table.num_brought(rank, micro_batch) for rank in ranks] for table in self.owner]
        layout = Layout(self._tables, counts, self.rank)
        message = layout.message(self._device, self._is_staged)
        for table, of_ranks in zip(self.owner, layout.rows(message), strict=True):
            for rank, out in of_ranks.items():
                table.give(rank, micro_batch, out)
        return self._filled(message, layout)

    def leaves(self, micro_batch: int) -> dict[str, Tensor]:
        """By table, once the micro-batch has been brought: its distinct rows. Each is asked for once."""
        return {table.request.table.name: table.leaf(micro_batch) for table in self.requester}

    def take(self, micro_batch: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Gradient return: from requesters to owners. By table; a leaf without gradient may be left out."""
        use_here(*gradients.values())
        layout = Layout(self._tables, [table.plans.take_counts[micro_batch] for table in self.requester], self.rank)
        message = layout.message(self._device, self._is_staged)
        own: list[tuple[Tensor, Places]] = []
        for table, of_ranks in zip(self.requester, layout.rows(message), strict=True):
            returned = list(table.returned(micro_batch, gradients.get(table.request.table.name)))
            own.append(returned[self.rank])
            for rank, out in of_ranks.items():
                rows, places = returned[rank]
                copy_rows(rows, places, out, None)

        def meanwhile() -> None:
            for owner, (rows, places) in zip(self.owner, own, strict=True):
                owner.add(self.rank, micro_batch, rows if places is None else take_rows(rows, places))

        self.gradient_bytes += layout.num_row_bytes
        counts = [[table.num_taken(rank, micro_batch) for rank in range(self.size)] for table in self.owner]
        outgoing = self._filled(message, layout)
        with self._exchanged(self.gradients_channel, outgoing, counts, meanwhile) as received:
            for owner, of_others in zip(self.owner, received, strict=True):
                for rank, rows in of_others.items():
                    owner.add(rank, micro_batch, rows)

    def gradients(self) -> list[Tensor | None]:
        """Of each table's slots, for the whole global batch; None for a frozen table."""
        return [None if table.table.frozen else table.gradient() for table in self.owner]

    def are_finite(self) -> list[Tensor | None]:
        """Whether each table's gradients are, one bool on the device; None: that is not known yet."""
        return [None for _ in self.owner]

    def _filled(self, message: Tensor, layout: Layout) -> Outgoing:
        if not self._is_staged:
            return Outgoing(message, layout, None)
        keep_alive_until(message, self._device)  # if the step is left, kernels may write to it that nobody waits for
        return Outgoing(message, layout, mark(self._device))

    @contextmanager
    def _exchanged(
        self, channel: Channel, outgoing: Outgoing, counts: list[list[int]], meanwhile: Callable[[], None]
    ) -> Iterator[list[dict[int, Tensor]]]:
        """One exchange carries all tables. counts[table][rank] rows come in: for each table, by rank, where they are,
        within the context. This rank's own are not among them: they are for `meanwhile`."""
        if outgoing.moment is not None:
            outgoing.moment.synchronize()
        incoming = Layout(self._tables, counts, self.rank)
        received = incoming.message(self._device, self._is_staged)
        channel.all_to_all(outgoing.message, outgoing.layout.sizes, received, incoming.sizes, meanwhile)
        try:
            yield incoming.rows(received)
        finally:
            if self._is_staged:
                keep_alive_until(received, self._device)
