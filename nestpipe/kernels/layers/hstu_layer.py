"""A layer of HSTU as one autograd function, in a third of the launches; nestpipe/ops/hstu.py has the formula.

On a device a layer often waits for the thread that launches its kernels. Here no single operation goes through
autograd, gradients of u, v, q, k are written to one array, and norms, gates and residuals take one pass each.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.attention.attention import Attention
from nestpipe.kernels.attention.tiles import Tiles
from nestpipe.kernels.layers.norms import Norm, norm, norm_backward


@dataclass(frozen=True)
class LayerShape:
    """Sizes and options of a layer."""

    num_heads: int
    dim_qk: int
    dim_v: int
    dropout: float
    """Probability of dropout; 0 to apply none."""
    eps: float
    dtype: torch.dtype
    """Dtype of products of matrices."""

    @property
    def widths(self) -> list[int]:
        """Widths of u, v, q, k."""
        return [self.num_heads * dim for dim in (self.dim_v, self.dim_v, self.dim_qk, self.dim_qk)]

    def split(self, uvqk: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns u [num_tokens, heads * dim_v] and v, q, k [num_tokens, heads, dim]."""
        u, v, q, k = uvqk.split(self.widths, dim=1)
        return u, *(x.unflatten(1, (self.num_heads, -1)) for x in (v, q, k))


def hstu_layer_kernel(
    x: Tensor,
    w_uvqk: Tensor,
    w_pos: Tensor,
    w_ts: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    tiles: Tiles,
    shape: LayerShape,
) -> Tensor:
    """Returns [num_tokens, dim] in the dtype of x."""
    out: Tensor = _Layer.apply(x, w_uvqk, w_pos, w_ts, w_out, b_out, tiles, shape)  # type: ignore[no-untyped-call]
    return out


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_uvqk: Tensor,
        w_pos: Tensor,
        w_ts: Tensor,
        w_out: Tensor,
        b_out: Tensor,
        tiles: Tiles,
        shape: LayerShape,
    ) -> Tensor:
        x = x.contiguous()
        w_in, w_back = w_uvqk.to(shape.dtype), w_out.to(shape.dtype)
        normed, first = norm(x, shape.dtype, shape.eps)
        z = normed @ w_in
        uvqk = F.silu(z)
        u, v, q, k = shape.split(uvqk)
        attention = Attention(q, k, v, w_pos, w_ts, tiles, three=False)
        attended = attention.forward().flatten(1)
        y, second = norm(attended, shape.dtype, shape.eps, u)
        kept = None
        if shape.dropout > 0:
            y, kept = torch.native_dropout(y, shape.dropout, True)
        ctx.save_for_backward(
            x,
            normed,
            z,
            uvqk,
            attended,
            y,
            kept,
            w_in,
            w_back,
            attention.w_pos,
            w_ts,
            *first.tensors,
            *second.tensors,
        )
        ctx.tiles, ctx.shape = tiles, shape
        return x + F.linear(y, w_back, b_out.to(shape.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, normed, z, uvqk, attended, y, kept, w_in, w_back, w_pos, w_ts, *norms = ctx.saved_tensors
        shape: LayerShape = ctx.shape
        first, second = Norm(*norms[:2]), Norm(*norms[2:])
        gradient = gradient.contiguous()
        d_out = gradient.to(shape.dtype)
        d_w_out, d_b_out = d_out.t() @ y, gradient.sum(0)
        d_y = d_out @ w_back
        if kept is not None:
            d_y = torch.ops.aten.native_dropout_backward(d_y, kept, 1 / (1 - shape.dropout))
        d_uvqk = torch.empty_like(uvqk)
        (u, v, q, k), (d_u, d_v, d_q, d_k) = shape.split(uvqk), shape.split(d_uvqk)
        d_attended = norm_backward(d_y, attended, second, gate=u, d_gate=d_u).view(v.shape)
        attention = Attention(q, k, v, w_pos, w_ts, ctx.tiles, three=False, is_padded=True)
        attention.query_gradients(d_attended, d_q)
        attention.key_gradients(d_attended, d_k, d_v)
        d_pos, d_ts = attention.weight_gradients(d_attended)
        d_z = torch.ops.aten.silu_backward(d_uvqk, z)
        d_w_in = normed.t() @ d_z
        d_x = norm_backward(d_z @ w_in.t(), x, first, added=gradient)
        return d_x, d_w_in.to(x.dtype), d_pos, d_ts, d_w_out.to(x.dtype), d_b_out, None, None
