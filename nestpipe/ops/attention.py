"""Causal attention without softmax over jagged sequences, with weights for distance and time.

q and k are [num_tokens, heads, dim_qk], v is [num_tokens, heads, dim_v], w_pos is [2 * max_length - 1], w_ts is [129].
A token attends to the tokens of its sample up to itself. For token i attending to token j, b_pos is
w_pos[max_length - 1 + j - i], and b_ts is w_ts[bucket of |time of token i + 1 - time of token j|].

Forms:
    plain     the reference; holds all scores of a batch, [num_samples, heads, max_length, max_length]
    blocked   holds the scores of a few blocks at a time and computes them again in backward, so that memory is linear
              in the number of tokens. Kernels do it on CUDA if Triton is installed, q, k, v are bfloat16 or float32
              and dims are at most 128; torch does it elsewhere
    kernel    the blocked form by kernels; an error where they cannot run

Sums are in float32 or float64; the output has the dtype of v.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nestpipe.kernels.attention.tiles import LARGEST_DIM, SIZES
from nestpipe.kernels.dispatch import compiles_triton, interprets_triton, kernels_cannot_run, without_autocast
from nestpipe.kernels.dispatch import product_dtype as product_dtype
from nestpipe.kernels.flops import counts_as
from nestpipe.ops.attention_blocks import BlockedFuxi, BlockedHstu, wide
from nestpipe.ops.sequences import BLOCK, Blocks, Pairs, Sequences

ATTENTION_FORMS = ("blocked", "kernel", "plain")


def hstu_attention(
    q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, sequences: Sequences, form: str = "blocked"
) -> Tensor:
    """Returns [num_tokens, heads, dim_v]: the sum of silu(q_i k_j + b_pos + b_ts) / max_length * v_j over j <= i."""
    check_weights(w_pos, sequences, form)
    if form == "plain":
        with counts_as(lambda: _flops(q, v, 1, sequences)):
            return _plain_hstu(q, k, v, w_pos, w_ts, sequences)
    if takes_kernels(q, q.dtype, q.shape[2], v.shape[2], form):
        from nestpipe.kernels.attention.attention import hstu_attention_kernel  # imports Triton

        return hstu_attention_kernel(q, k, v, w_pos, w_ts, sequences.in_tiles(SIZES[q.dtype]))
    with counts_as(lambda: _flops(q, v, 1, sequences)):
        out: Tensor = BlockedHstu.apply(q, k, v, w_pos, w_ts, _blocks(sequences))  # type: ignore[no-untyped-call]
    return out


def fuxi_attention(
    q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, sequences: Sequences, form: str = "blocked"
) -> Tensor:
    """Returns [num_tokens, heads, 3 * dim_v]: sums of b_pos v_j, of b_ts v_j and of silu(q_i k_j) / max_length * v_j.

    The sums run over j <= i.
    """
    check_weights(w_pos, sequences, form)
    if form == "plain":
        with counts_as(lambda: _flops(q, v, 3, sequences)):
            return _plain_fuxi(q, k, v, w_pos, w_ts, sequences)
    if takes_kernels(q, q.dtype, q.shape[2], v.shape[2], form):
        from nestpipe.kernels.attention.attention import fuxi_attention_kernel  # imports Triton

        return fuxi_attention_kernel(q, k, v, w_pos, w_ts, sequences.in_tiles(SIZES[q.dtype]))
    with counts_as(lambda: _flops(q, v, 3, sequences)):
        out: Tensor = BlockedFuxi.apply(q, k, v, w_pos, w_ts, _blocks(sequences))  # type: ignore[no-untyped-call]
    return out


def _flops(q: Tensor, v: Tensor, num_sums: int, sequences: Sequences) -> int:
    """Returns the operations of a forward: a score and sums over v for each token and each one up to it."""
    num_pairs = sum(length * (length + 1) // 2 for length in sequences.lengths)
    return 2 * q.shape[1] * (q.shape[2] + num_sums * v.shape[2]) * num_pairs


def tile_size(x: Tensor, dim_qk: int, dim_v: int, form: str) -> int | None:
    """Returns the size of the tiles that a layer on x works on; None if kernels do not run there."""
    dtype = product_dtype(x)
    return SIZES[dtype] if takes_kernels(x, dtype, dim_qk, dim_v, form) else None


def takes_kernels(x: Tensor, dtype: torch.dtype, dim_qk: int, dim_v: int, form: str) -> bool:
    """Returns whether kernels compute the attention of q, k, v in this dtype, on the device of x."""
    if form == "plain":
        return False
    can_take = dtype in SIZES and max(dim_qk, dim_v) <= LARGEST_DIM
    if form != "kernel":
        return can_take and compiles_triton(x)
    if not can_take:
        raise ValueError(
            f"attention 'kernel' takes bfloat16 or float32 and dims up to {LARGEST_DIM}, got {dtype} with dim_qk "
            f"{dim_qk} and dim_v {dim_v}; use 'blocked'"
        )
    if not (compiles_triton(x) or interprets_triton()):
        raise kernels_cannot_run("attention 'kernel'")
    return True


def _blocks(sequences: Sequences) -> Blocks:
    return sequences.in_blocks(min(BLOCK, sequences.max_length))


def check_form(form: str) -> None:
    if form not in ATTENTION_FORMS:
        raise ValueError(f"attention is {form!r}, must be one of {', '.join(map(repr, ATTENTION_FORMS))}")


def check_weights(w_pos: Tensor, sequences: Sequences, form: str) -> None:
    check_form(form)
    if len(w_pos) != 2 * sequences.max_length - 1:
        raise ValueError(
            f"w_pos has {len(w_pos)} weights, for a max_length of {(len(w_pos) + 1) // 2}, but times has "
            f"{sequences.max_length + 1} columns, for a max_length of {sequences.max_length}"
        )


def _plain_hstu(q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, sequences: Sequences) -> Tensor:
    blocks, dtype = sequences.in_blocks(sequences.max_length), v.dtype
    with without_autocast(q):
        b_pos, b_ts = _biases(w_pos, w_ts, sequences)
        q, k, v = (wide(blocks.by_head(x)) for x in (q, k, v))
        scores = q @ k.transpose(2, 3) + (b_pos + b_ts)[:, None]
        weights = F.silu(scores) / sequences.max_length
        return blocks.from_heads(weights.tril() @ v).to(dtype)


def _plain_fuxi(q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, sequences: Sequences) -> Tensor:
    blocks, dtype = sequences.in_blocks(sequences.max_length), v.dtype
    with without_autocast(q):
        b_pos, b_ts = _biases(w_pos, w_ts, sequences)
        q, k, v = (wide(blocks.by_head(x)) for x in (q, k, v))
        weights = F.silu(q @ k.transpose(2, 3)) / sequences.max_length
        by_position, by_time = b_pos.tril() @ v, b_ts.tril()[:, None] @ v
        return blocks.from_heads(torch.cat([by_position, by_time, weights.tril() @ v], dim=3)).to(dtype)


def _biases(w_pos: Tensor, w_ts: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Returns b_pos [max_length, max_length] and b_ts [samples that are not empty, max_length, max_length]."""
    blocks = sequences.in_blocks(sequences.max_length)
    numbers = torch.arange(blocks.num_blocks, device=w_pos.device)
    index, buckets = blocks.position_index(0), blocks.time_buckets(Pairs(numbers, numbers, 0))
    b_pos = w_pos.index_select(0, index.flatten()).view_as(index)
    return b_pos, w_ts.index_select(0, buckets.flatten()).view_as(buckets)
