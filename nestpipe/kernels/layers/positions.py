"""The input layer of models of histories by kernels: each token's scaled value plus the row of its place.

Sums are in float32 and in the order of samples.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.attention.tiles import Tiles
from nestpipe.kernels.layers import triton_positions


def add_positions_kernel(values: Tensor, positions: Tensor, tiles: Tiles, scale: float) -> Tensor:
    """Returns [num_tokens, dim]: scale * values[i] + positions[place of token i in its sample], all in float32."""
    if values.dtype != torch.float32 or positions.dtype != torch.float32:
        raise ValueError(f"values are {values.dtype} and positions {positions.dtype}; both must be float32")
    if len(values) != tiles.num_tokens or len(positions) < tiles.max_length:
        raise ValueError(
            f"there are {len(values)} values for {tiles.num_tokens} tokens, and {len(positions)} positions for "
            f"{tiles.max_length} places"
        )
    out: Tensor = _AddPositions.apply(values, positions, tiles, scale)  # type: ignore[no-untyped-call]
    return out


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, positions: Tensor, tiles: Tiles, scale: float) -> Tensor:
        ctx.tiles, ctx.scale, ctx.num_positions = tiles, scale, len(positions)
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        if tiles.num_blocks > 0:
            triton_positions.add(out, values.contiguous(), positions.contiguous(), tiles, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tiles, gradient = ctx.tiles, gradient.contiguous()
        num_places = tiles.most_blocks * tiles.size
        d_positions = gradient.new_zeros(max(num_places, ctx.num_positions), gradient.shape[1])
        triton_positions.sum_by_place(d_positions, gradient, tiles)
        return gradient * ctx.scale, d_positions[: ctx.num_positions], None, None
