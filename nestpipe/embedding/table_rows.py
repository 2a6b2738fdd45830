"""The rows of a group cut into those of its tables, and their gradients put together again.

torch's split joins the gradients of its parts by copying them. Here whatever computes the gradient of a table may write
it where it belongs, and only the others are copied.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nestpipe.embedding.recycler import recycled


class JoinedGradient:
    """The gradient of all rows of a group, in one piece of memory."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: rows of each table."""
        self.bounds = [0, *accumulate(sizes)]
        self._joined: Tensor | None = None
        self._handed_out: set[int] = set()

    def part(self, table: int, dim: int, dtype: torch.dtype) -> Tensor | None:
        """Returns uninitialised memory for the gradient of a table's rows; None if a backward has it already, because
        the table has several features."""
        if table in self._handed_out:
            return None
        self._handed_out.add(table)
        return self._memory(dim, dtype)[self.bounds[table] : self.bounds[table + 1]]

    def join(self, parts: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Returns the gradient of all rows. parts: that of each table, in its memory or elsewhere; None
        for zeros. like: one of them."""
        joined = self._memory(like.shape[1], like.dtype)
        for part, first, end in zip(parts, self.bounds, self.bounds[1:], strict=False):
            target = joined[first:end]
            if part is None:
                target.zero_()
            elif not (part.data_ptr() == target.data_ptr() and part.stride() == target.stride()):
                target.copy_(part)
        self._joined = None
        self._handed_out.clear()
        return joined

    def _memory(self, dim: int, dtype: torch.dtype) -> Tensor:
        if self._joined is None:
            self._joined = recycled.empty((self.bounds[-1], dim), dtype)
        return self._joined


class _Tables(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: JoinedGradient, rows: Tensor) -> tuple[Tensor, ...]:
        ctx.joined = joined
        ctx.set_materialize_grads(False)
        return tuple(rows[first:end] for first, end in zip(joined.bounds, joined.bounds[1:], strict=False))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None]:
        some = next((gradient for gradient in gradients if gradient is not None), None)
        if some is None:
            return None, None
        if torch.is_grad_enabled():  # this gradient is itself differentiated
            bounds = zip(gradients, ctx.joined.bounds, ctx.joined.bounds[1:], strict=False)
            parts = [some.new_zeros(end - first, some.shape[1]) if g is None else g for g, first, end in bounds]
            return None, torch.cat(parts)
        return None, ctx.joined.join(gradients, some)


def split_tables(rows: Tensor, joined: JoinedGradient) -> tuple[Tensor, ...]:
    """Returns the rows of each table. Their gradients become one in the memory of `joined`."""
    tables: tuple[Tensor, ...] = _Tables.apply(joined, rows)  # type: ignore[no-untyped-call]
    return tables
