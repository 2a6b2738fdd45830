"""The frozen window in a world of one: nothing travels. A position is a slot, so leaves are gathered from the owner's
rows, and their gradients added up where the row optimizer wants them."""

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor

from nestpipe.device.streams import use_here
from nestpipe.embedding.buffer import Buffer
from nestpipe.embedding.request import Request, TableRequest
from nestpipe.embedding.rows import add_rows, empty_rows, take_rows


class LocalTable:
    def __init__(self, request: TableRequest, buffer: Buffer) -> None:
        self.table = request.table
        self._positions = request.leaves
        """of each micro-batch's rows"""
        self._buffer = buffer
        self._leaves: dict[int, Tensor] = {}

    @cached_property
    def gradients(self) -> Tensor:
        """Of each slot."""
        shape = (len(self._buffer.keys), self.table.dim)
        return empty_rows(shape, self.table.dtype, self._buffer.records.device).zero_()

    def bring(self, micro_batch: int) -> None:
        self._leaves[micro_batch] = take_rows(self._buffer.frozen_rows, self._positions[micro_batch])

    def leaf(self, micro_batch: int) -> Tensor:
        leaf = self._leaves.pop(micro_batch)
        use_here(leaf)
        return leaf.requires_grad_(not self.table.frozen)

    def take(self, micro_batch: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        use_here(gradient)
        if len(self._positions) == 1:
            self.gradients = gradient  # of the only micro-batch: there is nothing to add it to
        else:
            add_rows(self.gradients, self._positions[micro_batch], gradient)

    def gradient(self) -> Tensor | None:
        if self.table.frozen:
            return None
        use_here(self.gradients)
        return self.gradients


class LocalWindow:
    """All tables of one batch; see Window."""

    row_bytes = gradient_bytes = 0

    def __init__(self, request: Request, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self._tables = [LocalTable(of, buffer) for of, buffer in zip(request.tables, buffers, strict=True)]

    def bring(self, micro_batch: int) -> None:
        for table in self._tables:
            table.bring(micro_batch)

    def leaves(self, micro_batch: int) -> dict[str, Tensor]:
        return {table.table.name: table.leaf(micro_batch) for table in self._tables}

    def take(self, micro_batch: int, gradients: Mapping[str, Tensor | None]) -> None:
        for table in self._tables:
            table.take(micro_batch, gradients.get(table.table.name))

    def gradients(self) -> list[Tensor | None]:
        return [table.gradient() for table in self._tables]
