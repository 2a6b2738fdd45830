"""A layer of HSTU in one piece: what nestpipe/ops/hstu.py defines, in a third of the launches.

On a device the thread that launches is often what a layer waits for. Here no operation goes through autograd on its
own, gradients of u, v, q, k are written side by side, and norms, gates and residuals are one pass each.
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
    num_heads: int
    dim_qk: int
    dim_v: int
    dropout: float
    """0: none"""
    eps: float
    dtype: torch.dtype
    """of products"""

    @property
    def widths(self) -> list[int]:
        """of u, v, q, k"""
        return [self.num_heads * dim for dim in (self.dim_v, self.dim_v, self.dim_qk, self.dim_qk)]

    def split(self, of_all: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u [num_tokens, heads * dim_v]; v, q, k [num_tokens, heads, dim]"""
        u, v, q, k = of_all.split(self.widths, dim=1)
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
    """[num_tokens, dim] of the dtype of x"""
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
        of_all = F.silu(z)
        u, v, q, k = shape.split(of_all)
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
            of_all,
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
        x, normed, z, of_all, attended, y, kept, w_in, w_back, w_pos, w_ts, *norms = ctx.saved_tensors
        shape: LayerShape = ctx.shape
        first, second = Norm(*norms[:2]), Norm(*norms[2:])
        gradient = gradient.contiguous()
        of_out = gradient.to(shape.dtype)
        d_w_out, d_b_out = of_out.t() @ y, gradient.sum(0)
        d_y = of_out @ w_back
        if kept is not None:
            d_y = torch.ops.aten.native_dropout_backward(d_y, kept, 1 / (1 - shape.dropout))
        d_all = torch.empty_like(of_all)
        (u, v, q, k), (d_u, d_v, d_q, d_k) = shape.split(of_all), shape.split(d_all)
        d_attended = norm_backward(d_y, attended, second, gate=u, d_gate=d_u).view(v.shape)
        attention = Attention(q, k, v, w_pos, w_ts, ctx.tiles, three=False, is_padded=True)
        attention.of_queries(d_attended, d_q)
        attention.of_keys(d_attended, d_k, d_v)
        d_pos, d_ts = attention.of_weights(d_attended)
        d_z = torch.ops.aten.silu_backward(d_all, z)
        d_w_in = normed.t() @ d_z
        d_x = norm_backward(d_z @ w_in.t(), x, first, added=gradient)
        return d_x, d_w_in.to(x.dtype), d_pos, d_ts, d_w_out.to(x.dtype), d_b_out, None, None
