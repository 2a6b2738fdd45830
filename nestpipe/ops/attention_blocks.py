"""The blocked forms of attention in torch: scores of a few pairs of blocks at a time, computed again in backward.

The order of summation is fixed and does not depend on other samples of the batch. A query's sum runs over its blocks of
keys from the nearest to the farthest, and a key's gradient over its blocks of queries in the same way. Gradients of
w_pos and w_ts are summed within a pair of blocks, then over pairs in order. Tokens in bfloat16 or float16 are converted
to float32.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.dispatch import without_autocast
from nestpipe.ops.sequences import Blocks, Pairs

Gradients = tuple[Tensor | None, ...]
Result = TypeVar("Result")


def exempt_from_autocast(function: Callable[..., Result]) -> Callable[..., Result]:
    """Runs a forward or backward without autocast, which would round what is meant to be in float32."""

    @wraps(function)
    def wrapped(ctx: Any, first: Tensor, *others: Any) -> Result:
        with without_autocast(first):
            return function(ctx, first, *others)

    return wrapped


class BlockedHstu(torch.autograd.Function):
    @staticmethod
    @exempt_from_autocast
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, blocks: Blocks) -> Tensor:
        ctx.save_for_backward(q, k, v, w_pos, w_ts)
        ctx.blocks = blocks
        dtype = v.dtype
        q, k, v = (wide(blocks.by_head(x)) for x in (q, k, v))
        out = torch.zeros_like(v)
        for pairs in blocks.pairs(q.shape[1]):
            scores, _ = _hstu_scores(q[pairs.queries], k[pairs.keys], w_pos, w_ts, blocks, pairs)
            weights = _causal(F.silu(scores, inplace=True), pairs)
            out.index_add_(0, pairs.queries, weights @ v[pairs.keys])
        return blocks.from_heads(out.div_(blocks.max_length)).to(dtype)

    @staticmethod
    @exempt_from_autocast
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        blocks, (q, k, v, w_pos, w_ts) = ctx.blocks, ctx.saved_tensors
        dtype = q.dtype
        q, k, v, d_out = (wide(blocks.by_head(x)) for x in (q, k, v, gradient))
        d_out.div_(blocks.max_length)
        d_q, d_k, d_v, d_pos, d_ts = map(torch.zeros_like, (q, k, v, w_pos, w_ts))
        for pairs in blocks.pairs(q.shape[1]):
            q_i, k_j, v_j, d_out_i = q[pairs.queries], k[pairs.keys], v[pairs.keys], d_out[pairs.queries]
            scores, buckets = _hstu_scores(q_i, k_j, w_pos, w_ts, blocks, pairs)
            d_biases = _add_score_gradients((d_q, d_k, d_v), (q_i, k_j, v_j), scores, d_out_i, pairs).sum(1)
            _add_position_gradient(d_pos, d_biases, blocks, pairs)
            _add_time_gradient(d_ts, d_biases, buckets)
        return *(blocks.from_heads(x).to(dtype) for x in (d_q, d_k, d_v)), d_pos, d_ts, None


class BlockedFuxi(torch.autograd.Function):
    @staticmethod
    @exempt_from_autocast
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor, w_ts: Tensor, blocks: Blocks) -> Tensor:
        ctx.save_for_backward(q, k, v, w_pos, w_ts)
        ctx.blocks = blocks
        # Weights of position and time are the same for all heads, so one product serves the values of all heads.
        values, heads, shape, dtype = wide(blocks.all_heads(v)), v.shape[1], v.shape, v.dtype
        q, k, v = (wide(blocks.by_head(x)) for x in (q, k, v))
        by_position, by_time, by_score = torch.zeros_like(values), torch.zeros_like(values), torch.zeros_like(v)
        for pairs in blocks.pairs(heads):
            values_j = values[pairs.keys]
            b_pos, b_ts, _ = _fuxi_biases(w_pos, w_ts, blocks, pairs)
            by_position.index_add_(0, pairs.queries, b_pos @ values_j)
            by_time.index_add_(0, pairs.queries, b_ts @ values_j)
            weights = _causal(F.silu(q[pairs.queries] @ k[pairs.keys].transpose(2, 3), inplace=True), pairs)
            by_score.index_add_(0, pairs.queries, weights @ v[pairs.keys])
        parts = [blocks.from_slots(x.flatten(0, 1)).view(shape) for x in (by_position, by_time)]
        return torch.cat([*parts, blocks.from_heads(by_score.div_(blocks.max_length))], dim=2).to(dtype)

    @staticmethod
    @exempt_from_autocast
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        blocks, (q, k, v, w_pos, w_ts) = ctx.blocks, ctx.saved_tensors
        d_position, d_time, d_score = gradient.split(v.shape[2], dim=2)
        values, d_position, d_time = (wide(blocks.all_heads(x)) for x in (v, d_position, d_time))
        shape, dtype = v.shape, v.dtype
        q, k, v, d_score = (wide(blocks.by_head(x)) for x in (q, k, v, d_score))
        d_score.div_(blocks.max_length)
        d_q, d_k, d_v, d_values, d_pos, d_ts = map(torch.zeros_like, (q, k, v, values, w_pos, w_ts))
        for pairs in blocks.pairs(q.shape[1]):
            values_j, d_position_i, d_time_i = values[pairs.keys], d_position[pairs.queries], d_time[pairs.queries]
            b_pos, b_ts, buckets = _fuxi_biases(w_pos, w_ts, blocks, pairs)
            d_both = (b_pos.transpose(1, 2) @ d_position_i).add_(b_ts.transpose(1, 2) @ d_time_i)
            d_values.index_add_(0, pairs.keys, d_both)
            _add_position_gradient(d_pos, _causal(d_position_i @ values_j.transpose(1, 2), pairs), blocks, pairs)
            _add_time_gradient(d_ts, _causal(d_time_i @ values_j.transpose(1, 2), pairs), buckets)

            q_i, k_j, v_j, d_score_i = q[pairs.queries], k[pairs.keys], v[pairs.keys], d_score[pairs.queries]
            scores = q_i @ k_j.transpose(2, 3)
            _add_score_gradients((d_q, d_k, d_v), (q_i, k_j, v_j), scores, d_score_i, pairs)
        d_v_tokens = blocks.from_heads(d_v).add_(blocks.from_slots(d_values.flatten(0, 1)).view(shape))
        return *(x.to(dtype) for x in (blocks.from_heads(d_q), blocks.from_heads(d_k), d_v_tokens)), d_pos, d_ts, None


def wide(x: Tensor) -> Tensor:
    """Returns x in float32 if its precision is lower."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _hstu_scores(
    q_i: Tensor, k_j: Tensor, w_pos: Tensor, w_ts: Tensor, blocks: Blocks, pairs: Pairs
) -> tuple[Tensor, Tensor]:
    """Returns scores [pairs, heads, size, size] and buckets of time [pairs, size, size]."""
    b_pos, b_ts, buckets = _biases(w_pos, w_ts, blocks, pairs)
    return (q_i @ k_j.transpose(2, 3)).add_(b_ts.add_(b_pos)[:, None]), buckets


def _fuxi_biases(w_pos: Tensor, w_ts: Tensor, blocks: Blocks, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Returns b_pos and b_ts, zero where a key comes after its query, and buckets of time; [pairs, size, size] each."""
    b_pos, b_ts, buckets = _biases(w_pos, w_ts, blocks, pairs)
    return _causal(b_pos, pairs).expand_as(b_ts), _causal(b_ts, pairs), buckets


def _biases(w_pos: Tensor, w_ts: Tensor, blocks: Blocks, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Returns b_pos [size, size], b_ts [pairs, size, size] and buckets of time [pairs, size, size]."""
    index, buckets = blocks.position_index(pairs.distance), blocks.time_buckets(pairs)
    b_pos = w_pos.index_select(0, index.flatten()).view_as(index)
    return b_pos, w_ts.index_select(0, buckets.flatten()).view_as(buckets), buckets


def _causal(weights: Tensor, pairs: Pairs) -> Tensor:
    """Sets weights to zero, in place, where a key comes after its query. That happens only within one block."""
    return weights.tril_() if pairs.distance == 0 else weights


def _add_score_gradients(
    gradients: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    scores: Tensor,
    d_out: Tensor,
    pairs: Pairs,
) -> Tensor:
    """Adds the gradients of q, k and v that come through the scores, and returns those of the scores.

    inputs, scores and d_out are those of the pairs. The scores are overwritten.
    """
    (d_q, d_k, d_v), (q, k, v) = gradients, inputs
    d_scores: Tensor = torch.ops.aten.silu_backward(d_out @ v.transpose(2, 3), scores)
    d_scores = _causal(d_scores, pairs)
    weights = _causal(F.silu(scores, inplace=True), pairs)
    d_v.index_add_(0, pairs.keys, weights.transpose(2, 3) @ d_out)
    d_q.index_add_(0, pairs.queries, d_scores @ k)
    d_k.index_add_(0, pairs.keys, d_scores.transpose(2, 3) @ q)
    return d_scores


def _add_position_gradient(d_pos: Tensor, d_biases: Tensor, blocks: Blocks, pairs: Pairs) -> None:
    d_pos.index_add_(0, blocks.position_index(pairs.distance).flatten(), d_biases.sum(0).flatten())


def _add_time_gradient(d_ts: Tensor, d_biases: Tensor, buckets: Tensor) -> None:
    """Adds the sum of these pairs to d_ts at once, so that fewer numbers are added to a large one."""
    d_ts.add_(torch.zeros_like(d_ts).index_add_(0, buckets.flatten(), d_biases.flatten()))
