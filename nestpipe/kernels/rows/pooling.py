"""Rows at the occurrences of keys on a device, and the backward; nestpipe/embedding/pooling.py does it in host memory.

One launch serves several features whose rows lie in one array. In host memory the backward goes through the samples and
adds to rows. On a device many programs work at once, so it goes through the rows, whose occurrences come with a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.rows.copy import copy_rows
from nestpipe.kernels.rows.segments import Segments, sum_segments


@dataclass(frozen=True)
class DeviceOccurrences:
    """The rows of each output vector, and the vectors that each row is part of."""

    vectors: Segments
    """Rows of each output vector."""
    rows: Segments | None
    """Vectors of each row; None if the rows are not trained."""
    weights: Tensor | None = None
    """Weights [n] of the occurrences, in the rows' dtype and in the order of `vectors`; None if all are 1."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "DeviceOccurrences":
        rows = None if self.rows is None else self.rows.map(function)
        weights = None if self.weights is None else function(self.weights)
        return DeviceOccurrences(self.vectors.map(function), rows, weights)


@dataclass(frozen=True)
class StoredRows:
    """Rows that lie in a larger array, in any order."""

    array: Tensor
    """[n, dim]"""
    places: Tensor | None
    """[m] place of each row; None if these are all rows of the array, in order."""

    def copied(self) -> Tensor:
        copy = self.array.new_empty(len(self.array if self.places is None else self.places), self.array.shape[1])
        copy_rows(self.array, self.places, copy, None)
        return copy


def pool(
    occurrences: DeviceOccurrences, rows: Tensor, num_features: int, stored: StoredRows | None = None
) -> tuple[Tensor, ...]:
    """Returns [num_samples, dim] for each feature: the sums of a sample's rows.

    Vector sample * num_features + feature is that of a feature and a sample. The results are views of one array.
    stored: where the rows are read; `rows` then only gets their gradients.
    """
    return _apply(_SideBySide(num_features, is_joined=False), occurrences, rows, stored)


def pool_joined(
    occurrences: DeviceOccurrences, rows: Tensor, num_features: int, stored: StoredRows | None = None
) -> Tensor:
    """Returns the results of `pool` side by side: [num_samples, num_features * dim]."""
    (joined,) = _apply(_SideBySide(num_features, is_joined=True), occurrences, rows, stored)
    return joined


def gather(
    occurrences: DeviceOccurrences, rows: Tensor, sizes: Sequence[int], stored: StoredRows | None = None
) -> tuple[Tensor, ...]:
    """Returns [size, dim] for each feature: its vectors, which lie one feature after the other. stored: as for pool."""
    return _apply(_OneAfterAnother(tuple(sizes)), occurrences, rows, stored)


def _apply(
    layout: "_Layout", occurrences: DeviceOccurrences, rows: Tensor, stored: StoredRows | None
) -> tuple[Tensor, ...]:
    is_made = occurrences.rows is not None and occurrences.rows.num_segments == len(rows)
    if rows.requires_grad and not is_made:
        raise ValueError(f"an array of {len(rows)} rows is trained, but its occurrences were not made for that")
    outputs: tuple[Tensor, ...] = _Sums.apply(layout, occurrences, stored, rows)  # type: ignore[no-untyped-call]
    return outputs


class _Layout(Protocol):
    """How the vectors of several features lie in one array."""

    def split(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs, which are views."""

    def join(self, gradients: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
        """Returns the gradients of all vectors as rows of one array, and their spacing, as of sum_segments. like: the
        array of rows."""


@dataclass(frozen=True)
class _SideBySide:
    """The vectors of a sample lie side by side."""

    num_features: int
    is_joined: bool
    """True if there is one output for all features."""

    def split(self, vectors: Tensor) -> tuple[Tensor, ...]:
        by_sample = vectors.view(-1, self.num_features * vectors.shape[1])
        if self.is_joined or self.num_features == 1:
            return (by_sample,)
        columns: tuple[Tensor, ...] = by_sample.split(vectors.shape[1], dim=1)
        return columns

    def join(self, gradients: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
        dim, number = like.shape[1], self.num_features
        given = [gradient for gradient in gradients if gradient is not None]
        if len(given) == len(gradients) and _are_columns(given, dim):
            # A step of a sample is a multiple of dim, so the vectors are rows of a larger array: nothing is copied.
            first, distance = given[0], given[0].stride(0) // dim
            num_rows = (len(first) - 1) * distance + number
            return first.as_strided((num_rows, dim), (dim, 1)), None if distance == number else (number, distance)
        if self.is_joined:
            return given[0].contiguous().view(-1, dim), None
        zeros = torch.zeros_like(given[0])
        parts = [zeros if gradient is None else gradient for gradient in gradients]
        return torch.stack(parts, dim=1).view(-1, dim), None


def _are_columns(arrays: Sequence[Tensor], dim: int) -> bool:
    """Returns whether arrays are columns of a wider one, side by side, whose width is a multiple of dim."""
    first = arrays[0]
    if len(first) < 2 or first.stride(1) != 1 or first.stride(0) < first.shape[1] or first.stride(0) % dim != 0:
        return False
    # Rows of several arrays that alternate in memory belong to one array.
    address, step, stride = first.data_ptr(), first.shape[1] * first.itemsize, first.stride()
    return all(array.data_ptr() == address + i * step and array.stride() == stride for i, array in enumerate(arrays))


@dataclass(frozen=True)
class _OneAfterAnother:
    """The vectors of a feature lie one after another."""

    sizes: tuple[int, ...]

    def split(self, vectors: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = vectors.split(self.sizes)
        return parts if len(parts) > 1 else (vectors,)

    def join(self, gradients: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
        pairs = zip(gradients, self.sizes, strict=True)
        parts = [like.new_zeros(size, like.shape[1]) if part is None else part for part, size in pairs]
        gradient = parts[0] if len(parts) == 1 else torch.cat(parts)
        is_readable = gradient.stride(1) == 1 and gradient.stride(0) >= gradient.shape[1]
        return gradient if is_readable else gradient.clone(memory_format=torch.contiguous_format), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layout: _Layout, occurrences: DeviceOccurrences, stored: StoredRows | None, rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.occurrences = layout, occurrences
        ctx.like = rows.new_empty(0, rows.shape[1])
        vectors = rows.new_empty(occurrences.vectors.num_segments, rows.shape[1])
        array, places = (rows, None) if stored is None else (stored.array, stored.places)
        sum_segments(array, occurrences.vectors, occurrences.weights, vectors, places=places)
        return layout.split(vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(gradient is None for gradient in gradients) or not ctx.needs_input_grad[3]:
            return None, None, None, None
        gradient, spacing = ctx.layout.join(gradients, ctx.like)
        occurrences: DeviceOccurrences = ctx.occurrences
        assert occurrences.rows is not None
        d_rows = gradient.new_empty(occurrences.rows.num_segments, gradient.shape[1])
        sum_segments(gradient, occurrences.rows, occurrences.weights, d_rows, spacing)
        return None, None, None, d_rows
