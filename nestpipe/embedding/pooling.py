"""Pooling of rows at the occurrences of their keys in host memory, and its backward, by the native library.

torch's `embedding_bag` and `embedding` are slower here: the backward of the first sorts, that of the second copies its
input, and neither writes features side by side. A row's gradients are summed in the order of its occurrences, whatever
the number of threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.embedding.recycler import recycled
from nestpipe.store.interface import DTYPES
from nestpipe.store.native.library import call, pointer


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
        return self.index.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    def native(self, num_rows: int, dim: int, dtype: int) -> list[int]:
        """Returns the fields of a nestpipe_occurrences. Its pointers go into the arrays of self, which must stay
        alive."""
        pointers = [pointer(array) or 0 for array in (self.index, self.offsets, self.weights)]
        return [*pointers, self.index.shape[0], self.num_samples, num_rows, dim, dtype]


class RowsOf(NamedTuple):
    """The rows that a feature uses, in an array that has rows of several tables."""

    array: int
    """Number of the array."""
    first: int
    """Its first row that belongs to the feature."""
    number: int


def pool(
    features: Sequence[Occurrences], row_arrays: Sequence[Tensor], places: Sequence[RowsOf] | None = None
) -> Tensor:
    """Returns the sums of each sample's rows, features side by side: [num_samples, sum of dims].

    places: the rows of each feature, if arrays have those of several; each row of an array then belongs to exactly one
    feature. None if feature i uses array i.
    """
    if len({rows.dtype for rows in row_arrays}) != 1:
        raise ValueError("features stand side by side only if there is at least one, and all have the same dtype")
    if places is None:
        places = [RowsOf(i, 0, rows.shape[0]) for i, rows in enumerate(row_arrays)]
    pooled: Tensor = _Pool.apply(features, places, *row_arrays)  # type: ignore[no-untyped-call]
    return pooled


def pool_into(out: Tensor, occurrences: Occurrences, rows: Tensor) -> None:
    """Writes the sums of each sample's rows to out, [num_samples, dim]."""
    native = np.array([occurrences.native(rows.shape[0], rows.shape[1], DTYPES.index(rows.dtype))], dtype=np.int64)
    sources = np.array([rows.data_ptr()], dtype=np.int64)
    call("pool", *_array(native), sources.ctypes.data, pointer(out), out.shape[1], torch.get_num_threads())


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Sequence[Occurrences], places: Sequence[RowsOf], *row_arrays: Tensor) -> Tensor:
        dtype, dims = row_arrays[0].dtype, [rows.shape[1] for rows in row_arrays]
        native = [
            occurrences.native(place.number, dims[place.array], DTYPES.index(dtype))
            for occurrences, place in zip(features, places, strict=True)
        ]
        ctx.features = features  # keeps the arrays alive that `native` points to
        ctx.native, ctx.places, ctx.shapes = np.array(native, dtype=np.int64), places, [r.shape for r in row_arrays]
        out = recycled.empty((features[0].num_samples, sum(dims[place.array] for place in places)), dtype)
        rows = _addresses(places, row_arrays)
        call("pool", *_array(ctx.native), rows.ctypes.data, pointer(out), out.shape[1], torch.get_num_threads())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if gradient.stride(1) != 1 or gradient.stride(0) < gradient.shape[1]:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        row_gradients = [
            recycled.empty(shape, gradient.dtype) if is_trained else None
            for shape, is_trained in zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)
        ]
        targets = _addresses(ctx.places, row_gradients)
        arguments = pointer(gradient), gradient.stride(0), targets.ctypes.data
        call("pool_backward", *_array(ctx.native), *arguments, torch.get_num_threads())
        return None, None, *row_gradients


def _addresses(places: Sequence[RowsOf], arrays: Sequence[Tensor | None]) -> NDArray[np.int64]:
    """Returns where the rows of each feature begin; 0 if there is no array."""
    steps = [(0, 0) if array is None else (array.data_ptr(), array.shape[1] * array.itemsize) for array in arrays]
    return np.array([steps[p.array][0] + p.first * steps[p.array][1] for p in places], dtype=np.int64)


def _array(native: NDArray[np.int64]) -> tuple[int, int]:
    """Returns address and length of an array of nestpipe_occurrences, whose fields have 8 bytes each."""
    return native.ctypes.data, len(native)
