"""The frozen window in a world of one: nothing travels. A position is a slot, so leaves are gathered from the owner's
rows, and their gradients added up where the row optimizer wants them."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from nestpipe.device.streams import use_here
from nestpipe.embedding.buffer import Buffer
from nestpipe.embedding.request import Request, TableRequest
from nestpipe.embedding.rows import add_rows, collect_rows, empty_rows, take_rows


class LocalTable:
    def __init__(self, request: TableRequest, buffer: Buffer) -> None:
        self.table = request.table
        self._positions = request.leaves
        """of each micro-batch's rows"""
        self._first_uses = request.first_uses if len(self._positions) > 1 else []
        self._buffer = buffer
        self._leaves: dict[int, Tensor] = {}

    @cached_property
    def gradients(self) -> Tensor:
        """Of each slot. What is collected does not count what lies there before."""
        shape = (len(self._buffer.keys), self.table.dim)
        gradients = empty_rows(shape, self.table.dtype, self._buffer.records.device)
        return gradients if self._first_uses else gradients.zero_()

    @cached_property
    def _is_unsound(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self._buffer.records.device)

    def bring(self, micro_batch: int) -> None:
        self._leaves[micro_batch] = take_rows(self._buffer.frozen_rows, self._positions[micro_batch])

    def leaf(self, micro_batch: int) -> Tensor:
        leaf = self._leaves.pop(micro_batch)
        use_here(leaf)
        return leaf.requires_grad_(not self.table.frozen)

    def take(self, micro_batch: int, gradient: Tensor | None) -> None:
        positions = self._positions[micro_batch]
        if gradient is None and (self.table.frozen or not self._first_uses):
            return
        if gradient is None:  # it may be the first, and the only one, that has these rows
            gradient = self._buffer.records.new_zeros(len(positions), self.table.dim)
        use_here(gradient)
        if len(self._positions) == 1:
            self.gradients = gradient  # of the only micro-batch: there is nothing to add it to
        elif self._first_uses:
            collect_rows(self.gradients, positions, gradient, self._first_uses[micro_batch], self._is_unsound)
        else:
            add_rows(self.gradients, positions, gradient)

    def gradient(self) -> Tensor | None:
        if self.table.frozen:
            return None
        use_here(self.gradients)
        return self.gradients

    def is_finite(self) -> Tensor | None:
        if self.table.frozen or not self._first_uses:
            return None
        use_here(self._is_unsound)
        return self._is_unsound[0] == 0


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

    def are_finite(self) -> list[Tensor | None]:
        return [table.is_finite() for table in self._tables]
