"""Rows placed at the occurrences of their keys, and their gradients on the way back, on a device.

As nestpipe/embedding/pooling.py does in host memory. There a backward goes through the samples and adds to rows; here,
where many programs work at once, it goes through the rows, whose occurrences come with the batch.
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
    """Which rows of a leaf each sample has, and which samples have each row."""

    samples: Segments
    rows: Segments | None
    """None: the leaf is not trained"""
    weights: Tensor | None = None
    """[n] of the rows' dtype, in the order of `samples`"""

    def map(self, function: Callable[[Tensor], Tensor]) -> "DeviceOccurrences":
        rows = None if self.rows is None else self.rows.map(function)
        weights = None if self.weights is None else function(self.weights)
        return DeviceOccurrences(self.samples.map(function), rows, weights)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "DeviceOccurrences":
        return self.map(lambda array: array.to(device, non_blocking=non_blocking))


def make_occurrences(
    index: Tensor, offsets: Tensor | None, weights: Tensor | None, num_rows: int, is_trained: bool = True
) -> DeviceOccurrences:
    """From arrays in host memory, as those of nestpipe.embedding.pooling.Occurrences."""
    if not is_trained:  # or by_row checks it
        check_index(index, num_rows)
    if weights is not None and weights.shape != index.shape:
        raise ValueError(f"there are {list(weights.shape)} weights for {list(index.shape)} occurrences")
    samples = one_each(index) if offsets is None else make_segments(index, offsets)
    rows = by_row(index, offsets, num_rows, weights is not None) if is_trained else None
    return DeviceOccurrences(samples, rows, weights)


def pool(features: Sequence[DeviceOccurrences], leaves: Sequence[Tensor]) -> Tensor:
    """[num_samples, sum of dims]: for each sample the sums of its rows, the features side by side."""
    if len({leaf.dtype for leaf in leaves}) != 1:
        raise ValueError("features stand side by side only if there is one at least, and all have the same dtype")
    for of, leaf in zip(features, leaves, strict=True):
        if leaf.requires_grad and (of.rows is None or of.rows.num_segments != len(leaf)):
            raise ValueError(f"a leaf of {len(leaf)} rows is trained, but its occurrences were not made for that")
    pooled: Tensor = _Pool.apply(features, *leaves)  # type: ignore[no-untyped-call]
    return pooled


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Sequence[DeviceOccurrences], *leaves: Tensor) -> Tensor:
        ctx.features = features
        ctx.dims = [leaf.shape[1] for leaf in leaves]
        out = leaves[0].new_empty(features[0].samples.num_segments, sum(ctx.dims))
        for of, leaf, columns in zip(features, leaves, out.split(ctx.dims, dim=1), strict=True):
            sum_segments(leaf, of.samples, of.weights, columns)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if gradient.stride(1) != 1 or gradient.stride(0) < gradient.shape[1]:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        row_gradients: list[Tensor | None] = [None]
        for of, columns, is_trained in zip(
            ctx.features, gradient.split(ctx.dims, dim=1), ctx.needs_input_grad[1:], strict=True
        ):
            if not is_trained:
                row_gradients.append(None)
                continue
            of_rows = gradient.new_empty(of.rows.num_segments, columns.shape[1])
            sum_segments(columns, of.rows, of.weights, of_rows)
            row_gradients.append(of_rows)
        return tuple(row_gradients)
