"""Pooling of rows at the occurrences of their keys in host memory, and its backward, by the native library.

torch's `embedding_bag` and `embedding` are slower here: the backward of the first sorts, that of the second copies its
input, and neither writes features side by side. A row's gradients are summed in the order of its occurrences, whatever
the number of threads.
"""

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.embedding.recycler import recycled
from nestpipe.store.interface import DTYPES
from nestpipe.store.native.library import NativeOccurrences, call, pointer


@dataclass(frozen=True)
class Occurrences:
    """The rows of each sample."""

    index: Tensor
    """[n] int64: row of each occurrence; one past the last row for padding."""
    offsets: Tensor | None = None
    """[num_samples + 1]: sample s has occurrences offsets[s]:offsets[s + 1]; None if each sample has one."""
    weights: Tensor | None = None
    """[n] factor of each occurrence, of the rows' dtype; None for all 1."""

    @property
    def num_samples(self) -> int:
        return len(self.index) if self.offsets is None else len(self.offsets) - 1

    def native(self, rows: Tensor) -> NativeOccurrences:
        """Returns pointers into the arrays of self, which must stay alive."""
        return NativeOccurrences(
            pointer(self.index),
            pointer(self.offsets),
            pointer(self.weights),
            len(self.index),
            self.num_samples,
            *rows.shape,
            DTYPES.index(rows.dtype),
        )


def pool(features: Sequence[Occurrences], row_arrays: Sequence[Tensor]) -> Tensor:
    """Returns the sums of each sample's rows, features side by side: [num_samples, sum of dims]."""
    if len({rows.dtype for rows in row_arrays}) != 1:
        raise ValueError("features stand side by side only if there is at least one, and all have the same dtype")
    pooled: Tensor = _Pool.apply(features, *row_arrays)  # type: ignore[no-untyped-call]
    return pooled


def pool_into(out: Tensor, occurrences: Occurrences, rows: Tensor) -> None:
    """Writes the sums of each sample's rows to out, [num_samples, dim]."""
    call("pool", byref(occurrences.native(rows)), pointer(rows), pointer(out), out.shape[1], torch.get_num_threads())


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Sequence[Occurrences], *row_arrays: Tensor) -> Tensor:
        ctx.features = features  # keeps the arrays alive that `native` points to
        ctx.native = [occurrences.native(rows) for occurrences, rows in zip(features, row_arrays, strict=True)]
        width = sum(rows.shape[1] for rows in row_arrays)
        out = recycled.empty((features[0].num_samples, width), row_arrays[0].dtype)
        for native, rows, columns in zip(ctx.native, row_arrays, _columns(out, ctx.native), strict=True):
            call("pool", byref(native), pointer(rows), pointer(columns), width, torch.get_num_threads())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if gradient.stride(1) != 1 or gradient.stride(0) < gradient.shape[1]:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        row_gradients: list[Tensor | None] = [None]
        for native, columns, is_trained in zip(
            ctx.native, _columns(gradient, ctx.native), ctx.needs_input_grad[1:], strict=True
        ):
            if not is_trained:
                row_gradients.append(None)
                continue
            row_gradient = recycled.empty((native.num_rows, native.dim), gradient.dtype)
            arguments = byref(native), pointer(columns), gradient.stride(0), pointer(row_gradient)
            call("pool_backward", *arguments, torch.get_num_threads())
            row_gradients.append(row_gradient)
        return tuple(row_gradients)


def _columns(array: Tensor, features: Sequence[NativeOccurrences]) -> tuple[Tensor, ...]:
    """Returns the columns of each feature."""
    columns: tuple[Tensor, ...] = array.split([native.dim for native in features], dim=1)
    return columns
