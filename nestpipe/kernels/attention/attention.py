"""Attention of HSTU and FuXi by kernels, forward and backward; nestpipe/ops/attention.py has the formulas.

Sums are in float32 and in a fixed order. No sum uses atomic additions, and a token's output and gradients have the same
bits whatever other samples are in the launch. Scores are computed again in backward. Apart from the tokens themselves,
memory is needed for the buckets of time (see Tiles) and, in backward, for a few hundred sums of each tile.
"""
# mypy: disable-error-code="import-untyped,no-untyped-call"

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.attention.tiles import LARGEST_DIM, SIZES, Tiles
from nestpipe.kernels.attention.triton_backward import keys_kernel, positions_kernel, queries_kernel, tiles_kernel
from nestpipe.kernels.attention.triton_forward import buckets_kernel, forward_kernel
from nestpipe.kernels.flops import counts_as
from nestpipe.kernels.launch import launch

SMALLEST_DOT = 16
"""Smallest number of columns in a product of tiles."""
PAIRS_AT_A_TIME = 32


def hstu_attention_kernel(q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, tiles: Tiles) -> Tensor:
    """Returns [num_tokens, heads, dim_v] in the dtype of q, k, v."""
    return _attend(q, k, v, w_pos, w_ts, tiles, False)


def fuxi_attention_kernel(q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, tiles: Tiles) -> Tensor:
    """Returns [num_tokens, heads, 3 * dim_v] in the dtype of q, k, v."""
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


def time_buckets(tiles: Tiles, times: Tensor, bounds: Tensor, out: Tensor) -> None:
    """Writes the buckets of time of all tiles to `out`, as Tiles.buckets describes."""
    arrays = out, times.to(torch.int64).contiguous(), bounds, tiles.blocks, tiles.pairs
    constants = {"NUM_BOUNDS": len(bounds), "SIZE": tiles.size}
    launch(buckets_kernel, tiles.round_tiles, *arrays, tiles.max_length, **constants)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, tiles: Tiles, three: bool
    ) -> Tensor:
        q, k, v = (_contiguous_heads(x) for x in (q, k, v))
        work = Attention(q, k, v, w_pos, w_ts, tiles, three)
        ctx.save_for_backward(q, k, v, work.w_pos, work.w_ts)
        ctx.tiles, ctx.three = tiles, three
        return work.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, w_pos, w_ts = ctx.saved_tensors
        needs = ctx.needs_input_grad
        work = Attention(q, k, v, w_pos, w_ts, ctx.tiles, ctx.three, is_padded=True)
        d_out = _contiguous_heads(d_out)
        d_q, d_k, d_v, d_pos, d_ts = (None,) * 5
        if needs[0]:
            d_q = q.new_empty(q.shape)
            work.query_gradients(d_out, d_q)
        if needs[1] or needs[2]:
            d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
            work.key_gradients(d_out, d_k, d_v)
        if needs[3] or needs[4]:
            d_pos, d_ts = work.weight_gradients(d_out)
        return d_q, d_k, d_v, d_pos, d_ts, None, None


class Attention:
    """Launches the kernels of one attention, forward and backward.

    q, k, v and arrays of their shape may be columns of wider arrays of tokens. The heads of a gradient are contiguous.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w_pos: Tensor,
        w_ts: Tensor,
        tiles: Tiles,
        three: bool,
        is_padded: bool = False,
    ) -> None:
        self.inputs = q, k, v
        self.w_pos = w_pos if is_padded else F.pad(w_pos, (tiles.size, tiles.size))
        self.w_ts = w_ts.contiguous()
        self.tiles = tiles
        self.three = three
        self.num_programs = tiles.num_blocks * q.shape[1]
        self.constants = _constants(q, v, tiles, three)
        self.numbers = {"num_heads": q.shape[1], "max_length": tiles.max_length}

    def forward(self) -> Tensor:
        v = self.inputs[2]
        out = v.new_empty(*v.shape[:2], v.shape[2] * (3 if self.three else 1))
        with counts_as(self._forward_flops):
            self._launch(forward_kernel, out, out)
        return out

    def _forward_flops(self) -> int:
        q, _, v = self.inputs
        return 2 * q.shape[1] * (q.shape[2] + v.shape[2] * (3 if self.three else 1)) * self.tiles.num_pairs

    def query_gradients(self, d_out: Tensor, d_q: Tensor) -> None:
        self._launch(queries_kernel, d_out, d_out, d_q, d_q_token=d_q.stride(0))

    def key_gradients(self, d_out: Tensor, d_k: Tensor, d_v: Tensor) -> None:
        self._launch(keys_kernel, d_out, d_out, d_k, d_v, d_k_token=d_k.stride(0), d_v_token=d_v.stride(0))

    def weight_gradients(self, d_out: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of w_pos and w_ts."""
        tiles = self.tiles
        d_pos = self.w_pos.new_zeros(2 * tiles.max_length - 1)
        if tiles.num_tiles == 0:
            return d_pos, torch.zeros_like(self.w_ts)
        by_diagonal = self.w_pos.new_empty(tiles.num_tiles, 2 * tiles.size)
        by_bucket = self.w_ts.new_empty(tiles.num_tiles, len(self.w_ts))
        arrays = *self.inputs, d_out, by_diagonal, by_bucket, *self._shared(), tiles.pairs
        launch(
            tiles_kernel,
            tiles.num_tiles,
            *arrays,
            **self._strides(d_out),
            **self.numbers,
            **self.constants,
            NUM_BUCKETS=len(self.w_ts),
        )
        constants = {"ROWS": PAIRS_AT_A_TIME, "SIZE": tiles.size}
        launch(positions_kernel, tiles.most_blocks, d_pos, by_diagonal, tiles.starts, tiles.max_length, **constants)
        return d_pos, by_bucket.sum(0)

    def _launch(self, kernel: Any, out: Tensor, *arrays: Tensor, **strides: int) -> None:
        if self.num_programs > 0:
            arrays = *self.inputs, *arrays, *self._shared()
            numbers = self._strides(out) | strides | self.numbers
            launch(kernel, self.num_programs, *arrays, **numbers, **self.constants)

    def _shared(self) -> tuple[Tensor, ...]:
        return self.w_pos, self.w_ts, self.tiles.buckets, self.tiles.blocks

    def _strides(self, out: Tensor) -> dict[str, int]:
        (q_token, q_head, _), (k_token, k_head, _), (v_token, v_head, _) = (x.stride() for x in self.inputs)
        out_token, out_head, _ = out.stride()
        return {
            "q_token": q_token,
            "q_head": q_head,
            "k_token": k_token,
            "k_head": k_head,
            "v_token": v_token,
            "v_head": v_head,
            "out_token": out_token,
            "out_head": out_head,
        }


def _constants(q: Tensor, v: Tensor, tiles: Tiles, three: bool) -> dict[str, Any]:
    """Returns the constants of the kernels. They depend on dims and dtype only: another choice gives other bits."""
    pad_qk, pad_v = (max(SMALLEST_DOT, triton.next_power_of_2(x.shape[2])) for x in (q, v))
    return {
        "DIM_QK": q.shape[2],
        "DIM_V": v.shape[2],
        "PAD_QK": pad_qk,
        "PAD_V": pad_v,
        "SIZE": tiles.size,
        "THREE": three,
        "PRECISION": "ieee",  # without it, products of float32 would be rounded to tf32
        "num_warps": 4 if q.dtype == torch.bfloat16 and max(pad_qk, pad_v) <= 64 and not three else 8,
        "num_stages": 2,
    }


def _contiguous_heads(x: Tensor) -> Tensor:
    """Returns x with the elements of a head contiguous. Tokens and heads may have any strides."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
