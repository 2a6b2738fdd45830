"""Causal attention without softmax over jagged sequences, with weights for distance and time.

q, k [num_tokens, heads, dim_qk] and v [num_tokens, heads, dim_v]; w_pos [2 * max_length - 1], w_ts [129]. A token looks
at those of its sample up to itself; for token i looking at token j, b_pos = w_pos[max_length - 1 + j - i] and
b_ts = w_ts[bucket of |time of token i + 1 - time of token j|]. Two forms: "plain", the reference, holds all scores of
a batch, [num_samples, heads, max_length, max_length]; "blocked" a few blocks at a time, and makes them again in
backward, so that its memory is linear in the number of tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nestpipe.ops.attention_blocks import BlockedFuxi, BlockedHstu
from nestpipe.ops.sequences import BLOCK, Blocks, Pairs, Sequences

ATTENTION_FORMS = ("blocked", "plain")


def hstu_attention(
    q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, sequences: Sequences, form: str = "blocked"
) -> Tensor:
    """[num_tokens, heads, dim_v]: the sum of silu(q_i k_j + b_pos + b_ts) / max_length * v_j over j <= i."""
    check_form(form)
    _check_lengths(w_pos, sequences)
    if form == "plain":
        return _plain_hstu(q, k, v, w_pos, w_ts, sequences)
    out: Tensor = BlockedHstu.apply(q, k, v, w_pos, w_ts, _blocks(sequences))  # type: ignore[no-untyped-call]
    return out


def fuxi_attention(
    q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, sequences: Sequences, form: str = "blocked"
) -> Tensor:
    """[num_tokens, heads, 3 * dim_v]: sums over j <= i of b_pos v_j, b_ts v_j, silu(q_i k_j) / max_length * v_j."""
    check_form(form)
    _check_lengths(w_pos, sequences)
    if form == "plain":
        return _plain_fuxi(q, k, v, w_pos, w_ts, sequences)
    out: Tensor = BlockedFuxi.apply(q, k, v, w_pos, w_ts, _blocks(sequences))  # type: ignore[no-untyped-call]
    return out


def _blocks(sequences: Sequences) -> Blocks:
    return sequences.in_blocks(min(BLOCK, sequences.max_length))


def check_form(form: str) -> None:
    if form not in ATTENTION_FORMS:
        raise ValueError(f"attention is {form!r}, must be one of {', '.join(map(repr, ATTENTION_FORMS))}")


def _check_lengths(w_pos: Tensor, sequences: Sequences) -> None:
    if len(w_pos) != 2 * sequences.max_length - 1:
        raise ValueError(
            f"w_pos has {len(w_pos)} weights, for a max_length of {(len(w_pos) + 1) // 2}, but times has "
            f"{sequences.max_length + 1} columns, for a max_length of {sequences.max_length}"
        )


def _plain_hstu(q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, sequences: Sequences) -> Tensor:
    blocks = sequences.in_blocks(sequences.max_length)
    b_pos, b_ts = _biases(w_pos, w_ts, sequences)
    q, k, v = (blocks.by_head(x) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) + (b_pos + b_ts)[:, None]
    weights = F.silu(scores) / sequences.max_length
    return blocks.from_heads(weights.tril() @ v)


def _plain_fuxi(q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, sequences: Sequences) -> Tensor:
    blocks = sequences.in_blocks(sequences.max_length)
    b_pos, b_ts = _biases(w_pos, w_ts, sequences)
    q, k, v = (blocks.by_head(x) for x in (q, k, v))
    weights = F.silu(q @ k.transpose(2, 3)) / sequences.max_length
    by_position, by_time = b_pos.tril() @ v, b_ts.tril()[:, None] @ v
    return blocks.from_heads(torch.cat([by_position, by_time, weights.tril() @ v], dim=3))


def _biases(w_pos: Tensor, w_ts: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """[max_length, max_length], and [samples, max_length, max_length] of the samples that are not empty."""
    blocks = sequences.in_blocks(sequences.max_length)
    whole = torch.arange(blocks.num_blocks, device=w_pos.device)
    index, buckets = blocks.position_index(0), blocks.time_buckets(Pairs(whole, whole, 0))
    b_pos = w_pos.index_select(0, index.flatten()).view_as(index)
    return b_pos, w_ts.index_select(0, buckets.flatten()).view_as(buckets)
