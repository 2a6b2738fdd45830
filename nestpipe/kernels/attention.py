"""Attention of HSTU and FuXi on a device, by kernels: what nestpipe/ops/attention.py defines, with its gradients.

Sums are in float32 and in a fixed order: no sum uses atomic additions, and a token's output and gradients have the same
bits whatever other samples are in the launch. Scores are made again in backward; beyond what each token has, memory is
needed for the buckets of time (see Tiles) and, in backward, for a few hundred sums of each tile.
"""
# mypy: disable-error-code="import-untyped,no-untyped-call"

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.attention_backward import keys_kernel, positions_kernel, queries_kernel, tiles_kernel
from nestpipe.kernels.attention_forward import buckets_kernel, forward_kernel
from nestpipe.kernels.attention_tiles import LARGEST_DIM, SIZES, Tiles

SMALLEST_DOT = 16
"""columns that a product of tiles needs"""
PAIRS_AT_A_TIME = 32


def hstu_attention_kernel(q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, tiles: Tiles) -> Tensor:
    """[num_tokens, heads, dim_v] of the dtype of q, k, v"""
    return _attend(q, k, v, w_pos, w_ts, tiles, False)


def fuxi_attention_kernel(q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, tiles: Tiles) -> Tensor:
    """[num_tokens, heads, 3 * dim_v] of the dtype of q, k, v"""
    return _attend(q, k, v, w_pos, w_ts, tiles, True)


def _attend(q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, tiles: Tiles, three: bool) -> Tensor:
    if q.dtype not in SIZES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; all must be bfloat16, or all float32")
    if max(q.shape[2], v.shape[2]) > LARGEST_DIM:
        raise ValueError(f"dim_qk is {q.shape[2]} and dim_v {v.shape[2]}; the kernels take up to {LARGEST_DIM}")
    if len(q) != tiles.num_tokens:
        raise ValueError(f"there are {len(q)} tokens, but sequences have {tiles.num_tokens}")
    out: Tensor = _Attention.apply(q, k, v, w_pos.float(), w_ts.float(), tiles, three)
    return out


def time_buckets(tiles: Tiles, times: Tensor, bounds: Tensor) -> Tensor:
    """As Tiles.buckets; see there."""
    buckets = torch.empty(tiles.num_tiles, tiles.size, tiles.size, dtype=torch.uint8, device=times.device)
    if tiles.num_tiles > 0:
        with torch.cuda.device_of(times):
            buckets_kernel[(tiles.num_tiles,)](
                buckets,
                times.to(torch.int64).contiguous(),
                bounds,
                tiles.blocks,
                tiles.pairs,
                tiles.max_length,
                NUM_BOUNDS=len(bounds),
                SIZE=tiles.size,
            )
    return buckets


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, tiles: Tiles, three: bool
    ) -> Tensor:
        q, k, v = (_side_by_side(x) for x in (q, k, v))
        w_pos, w_ts = F.pad(w_pos, (tiles.size, tiles.size)), w_ts.contiguous()
        ctx.save_for_backward(q, k, v, w_pos, w_ts)
        ctx.tiles, ctx.three = tiles, three
        out = v.new_empty(*v.shape[:2], v.shape[2] * (3 if three else 1))
        if tiles.num_blocks > 0:
            with torch.cuda.device_of(q):
                forward_kernel[(tiles.num_blocks * q.shape[1],)](
                    q, k, v, out, w_pos, w_ts, tiles.buckets, tiles.blocks, **_options(q, k, v, out, tiles, three)
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, w_pos, w_ts = ctx.saved_tensors
        tiles, three, needs = ctx.tiles, ctx.three, ctx.needs_input_grad
        d_out = _side_by_side(d_out)
        with torch.cuda.device_of(q):
            launch = _Backward(q, k, v, w_pos, w_ts, d_out, tiles, three)
            d_q = launch.of_queries() if needs[0] else None
            d_k, d_v = launch.of_keys() if needs[1] or needs[2] else (None, None)
            d_pos, d_ts = launch.of_weights() if needs[3] or needs[4] else (None, None)
        return d_q, d_k, d_v, d_pos, d_ts, None, None


class _Backward:
    """The launches of one backward."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w_pos: Tensor,
        w_ts: Tensor,
        d_out: Tensor,
        tiles: Tiles,
        three: bool,
    ) -> None:
        self.inputs = q, k, v, d_out
        self.weights = w_pos, w_ts
        self.tiles = tiles
        self.options = _options(q, k, v, d_out, tiles, three)
        self.num_programs = tiles.num_blocks * q.shape[1]

    def of_queries(self) -> Tensor:
        d_q = _empty(self.inputs[0])
        if self.num_programs > 0:
            queries_kernel[(self.num_programs,)](*self.inputs, d_q, *self._shared(), **self.options)
        return d_q

    def of_keys(self) -> tuple[Tensor, Tensor]:
        d_k, d_v = _empty(self.inputs[1]), _empty(self.inputs[2])
        if self.num_programs > 0:
            keys_kernel[(self.num_programs,)](*self.inputs, d_k, d_v, *self._shared(), **self.options)
        return d_k, d_v

    def of_weights(self) -> tuple[Tensor, Tensor]:
        tiles, (w_pos, w_ts) = self.tiles, self.weights
        d_pos = w_pos.new_zeros(2 * tiles.max_length - 1)
        if tiles.num_tiles == 0:
            return d_pos, torch.zeros_like(w_ts)
        by_diagonal = w_pos.new_empty(tiles.num_tiles, 2 * tiles.size)
        by_bucket = w_ts.new_empty(tiles.num_tiles, len(w_ts))
        tiles_kernel[(tiles.num_tiles,)](
            *self.inputs, by_diagonal, by_bucket, *self._shared(), tiles.pairs, **self.options, NUM_BUCKETS=len(w_ts)
        )
        positions_kernel[(tiles.most_blocks,)](
            d_pos, by_diagonal, tiles.starts, tiles.max_length, ROWS=PAIRS_AT_A_TIME, SIZE=tiles.size
        )
        return d_pos, by_bucket.sum(0)

    def _shared(self) -> tuple[Tensor, ...]:
        return *self.weights, self.tiles.buckets, self.tiles.blocks


def _options(q: Tensor, k: Tensor, v: Tensor, out: Tensor, tiles: Tiles, three: bool) -> dict[str, Any]:
    """What all kernels take by name. Chosen by dims and dtype alone, never by trying: another choice has other bits."""
    strides = {
        f"{name}_{what}": x.stride(dim)
        for name, x in (("q", q), ("k", k), ("v", v), ("out", out))
        for dim, what in enumerate(("token", "head"))
    }
    pads = [max(SMALLEST_DOT, triton.next_power_of_2(x.shape[2])) for x in (q, v)]
    return strides | {
        "num_heads": q.shape[1],
        "max_length": tiles.max_length,
        "DIM_QK": q.shape[2],
        "DIM_V": v.shape[2],
        "PAD_QK": pads[0],
        "PAD_V": pads[1],
        "SIZE": tiles.size,
        "THREE": three,
        "PRECISION": "ieee",  # of products of float32, or they would be rounded to tf32
        "num_warps": 4 if q.dtype == torch.bfloat16 and max(pads) <= 64 and not three else 8,
        "num_stages": 2,
    }


def _side_by_side(x: Tensor) -> Tensor:
    """The elements of a head; tokens and heads may lie anywhere."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)
