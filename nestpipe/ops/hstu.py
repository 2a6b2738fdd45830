"""A layer of HSTU: attention without softmax between two norms, with a gate and a residual.

Its forms are those of attention. Where the kernels of attention run, the whole layer is one autograd function.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nestpipe.ops.attention import check_weights, hstu_attention, product_dtype, tile_size
from nestpipe.ops.sequences import Sequences

EPS = 1e-6


@dataclass(frozen=True)
class HSTUWeights:
    """Parameters of a layer."""

    w_uvqk: Tensor
    """[dim, heads * (2 * dim_v + 2 * dim_qk)]"""
    w_pos: Tensor
    w_ts: Tensor
    w_out: Tensor
    """[dim, heads * dim_v]"""
    b_out: Tensor


def hstu_layer(
    x: Tensor, weights: HSTUWeights, sequences: Sequences, num_heads: int, dim_v: int, dropout: float, form: str
) -> Tensor:
    """Returns x + dropout(u * norm(attention of v, q, k)) w_out + b_out, where u, v, q, k = silu(norm(x) w_uvqk).

    x and the result are [num_tokens, dim]. A dropout of 0 is not applied.
    """
    check_weights(weights.w_pos, sequences, form)
    dim_qk = weights.w_uvqk.shape[1] // (2 * num_heads) - dim_v
    size = tile_size(x, dim_qk, dim_v, form)
    if size is not None:
        from nestpipe.kernels.layers.hstu_layer import LayerShape, hstu_layer_kernel  # imports Triton

        shape = LayerShape(num_heads, dim_qk, dim_v, dropout, EPS, product_dtype(x))
        parameters = weights.w_uvqk, weights.w_pos, weights.w_ts, weights.w_out, weights.b_out
        return hstu_layer_kernel(x, *parameters, sequences.in_tiles(size), shape)
    z = F.silu(F.layer_norm(x, x.shape[1:], eps=EPS) @ weights.w_uvqk)
    u, v, q, k = z.split([num_heads * dim for dim in (dim_v, dim_v, dim_qk, dim_qk)], dim=1)
    q, k, v = (part.unflatten(1, (num_heads, -1)) for part in (q, k, v))
    attended = hstu_attention(q, k, v, weights.w_pos, weights.w_ts, sequences, form).flatten(1)
    y = u * F.layer_norm(attended, attended.shape[1:], eps=EPS)
    return x + F.linear(F.dropout(y, dropout), weights.w_out, weights.b_out)
