"""Pooling of rows by sample on a device, and its backward; nestpipe/embedding/pooling.py does it in host memory.

In host memory the backward goes through the samples and adds to rows. On a device many programs work at once, so it
goes through the rows, whose occurrences come with the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.rows.segments import Segments, by_row, check_index, make_segments, one_each, sum_segments


@dataclass(frozen=True)
class DeviceOccurrences:
    """The rows of each sample, and the samples of each row."""

    samples: Segments
    rows: Segments | None
    """Samples of each row; None if the rows are not trained."""
    weights: Tensor | None = None
    """Weights [n] of the occurrences, in the rows' dtype and in the order of `samples`; None if all are 1."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "DeviceOccurrences":
        rows = None if self.rows is None else self.rows.map(function)
        weights = None if self.weights is None else function(self.weights)
        return DeviceOccurrences(self.samples.map(function), rows, weights)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "DeviceOccurrences":
        return self.map(lambda array: array.to(device, non_blocking=non_blocking))


def make_occurrences(
    index: Tensor, offsets: Tensor | None, weights: Tensor | None, num_rows: int, is_trained: bool = True
) -> DeviceOccurrences:
    """Makes occurrences from arrays in host memory, which nestpipe.embedding.pooling.Occurrences describes."""
    if not is_trained:  # otherwise by_row checks it
        check_index(index, num_rows)
    if weights is not None and weights.shape != index.shape:
        raise ValueError(f"there are {list(weights.shape)} weights for {list(index.shape)} occurrences")
    samples = one_each(index) if offsets is None else make_segments(index, offsets)
    rows = by_row(index, offsets, num_rows, weights is not None) if is_trained else None
    return DeviceOccurrences(samples, rows, weights)


def pool(features: Sequence[DeviceOccurrences], row_arrays: Sequence[Tensor]) -> Tensor:
    """Returns [num_samples, sum of dims]: for each sample the sum of its rows, one feature after the other."""
    if len({rows.dtype for rows in row_arrays}) != 1:
        raise ValueError("features stand side by side only if there is one at least, and all have the same dtype")
    for occurrences, rows in zip(features, row_arrays, strict=True):
        is_made = occurrences.rows is not None and occurrences.rows.num_segments == len(rows)
        if rows.requires_grad and not is_made:
            raise ValueError(
                f"an array of {len(rows)} rows is trained, but its occurrences were not made for that; make them with "
                "is_trained=True"
            )
    pooled: Tensor = _Pool.apply(features, *row_arrays)  # type: ignore[no-untyped-call]
    return pooled


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Sequence[DeviceOccurrences], *row_arrays: Tensor) -> Tensor:
        ctx.features = features
        ctx.dims = [rows.shape[1] for rows in row_arrays]
        out = row_arrays[0].new_empty(features[0].samples.num_segments, sum(ctx.dims))
        for occurrences, rows, columns in zip(features, row_arrays, out.split(ctx.dims, dim=1), strict=True):
            sum_segments(rows, occurrences.samples, occurrences.weights, columns)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if gradient.stride(1) != 1 or gradient.stride(0) < gradient.shape[1]:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        row_gradients: list[Tensor | None] = [None]
        for occurrences, columns, is_trained in zip(
            ctx.features, gradient.split(ctx.dims, dim=1), ctx.needs_input_grad[1:], strict=True
        ):
            if not is_trained:
                row_gradients.append(None)
                continue
            d_rows = gradient.new_empty(occurrences.rows.num_segments, columns.shape[1])
            sum_segments(columns, occurrences.rows, occurrences.weights, d_rows)
            row_gradients.append(d_rows)
        return tuple(row_gradients)
