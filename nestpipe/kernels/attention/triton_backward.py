"""Kernels of attention: the backward for q, for k and v, and for the weights of position and time."""

import triton
import triton.language as tl

from nestpipe.kernels.attention.triton_blocks import (
    is_seen,
    load_block,
    load_block_and_head,
    load_tokens,
    load_weights,
    score_gradients,
    silu_and_slope,
    store_tokens,
)


@triton.jit
def queries_kernel(
    q, k, v, d_out, d_q, w_pos, w_ts, buckets, blocks,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, d_q_token,
    num_heads, max_length,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, PAD_QK: tl.constexpr, PAD_V: tl.constexpr,
    SIZE: tl.constexpr, THREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one block of queries and one head, over keys from the nearest block to the farthest."""
    head, number, first, length, first_tile = load_block_and_head(blocks, num_heads)
    q_block = load_tokens(q + first * q_token + head * q_head, q_token, number, length, DIM_QK, PAD_QK, SIZE)
    k_at, v_at = k + first * k_token + head * k_head, v + first * v_token + head * v_head
    d_out_at = d_out + first * out_token + head * out_head
    if THREE:
        d_out_at += 2 * DIM_V
    d_out_block = load_tokens(d_out_at, out_token, number, length, DIM_V, PAD_V, SIZE)
    total = tl.zeros((SIZE, PAD_QK), dtype=tl.float32)
    for distance in range(number + 1):
        key_number = number - distance
        k_block = load_tokens(k_at, k_token, key_number, length, DIM_QK, PAD_QK, SIZE)
        v_block = load_tokens(v_at, v_token, key_number, length, DIM_V, PAD_V, SIZE)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
        if not THREE:
            b_pos, b_ts, _ = load_weights(w_pos, w_ts, buckets, first_tile, number, key_number, max_length, SIZE)
            scores += tl.trans(b_pos + b_ts)
        _, slope = silu_and_slope(scores)
        seen = tl.trans(is_seen(number, key_number, SIZE))
        d_scores = score_gradients(d_out_block, v_block, slope, seen, PRECISION)
        total = tl.dot(d_scores.to(k_block.dtype), k_block, total, input_precision=PRECISION)
    d_q_at = d_q + first * d_q_token + head * DIM_QK
    store_tokens(d_q_at, d_q_token, total / max_length, number, length, DIM_QK, PAD_QK, SIZE)


@triton.jit
def keys_kernel(
    q, k, v, d_out, d_k, d_v, w_pos, w_ts, buckets, blocks,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, d_k_token, d_v_token,
    num_heads, max_length,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, PAD_QK: tl.constexpr, PAD_V: tl.constexpr,
    SIZE: tl.constexpr, THREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one block of keys and one head, over queries from the nearest block to the farthest."""
    head, number, first, length, first_tile = load_block_and_head(blocks, num_heads)
    k_block = load_tokens(k + first * k_token + head * k_head, k_token, number, length, DIM_QK, PAD_QK, SIZE)
    v_block = load_tokens(v + first * v_token + head * v_head, v_token, number, length, DIM_V, PAD_V, SIZE)
    q_at, d_out_at = q + first * q_token + head * q_head, d_out + first * out_token + head * out_head
    total_k = tl.zeros((SIZE, PAD_QK), dtype=tl.float32)
    by_score = tl.zeros((SIZE, PAD_V), dtype=tl.float32)
    by_bias = tl.zeros((SIZE, PAD_V), dtype=tl.float32)
    for distance in range(tl.cdiv(length, SIZE) - number):
        query_number = number + distance
        seen = is_seen(query_number, number, SIZE)
        b_pos, b_ts, _ = load_weights(w_pos, w_ts, buckets, first_tile, query_number, number, max_length, SIZE)
        q_block = load_tokens(q_at, q_token, query_number, length, DIM_QK, PAD_QK, SIZE)
        scores = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION)
        d_score_at = d_out_at
        if THREE:
            b_pos, b_ts = tl.where(seen, b_pos, 0.0).to(v_block.dtype), tl.where(seen, b_ts, 0.0).to(v_block.dtype)
            d_position_block = load_tokens(d_out_at, out_token, query_number, length, DIM_V, PAD_V, SIZE)
            by_bias = tl.dot(b_pos, d_position_block, by_bias, input_precision=PRECISION)
            d_time_block = load_tokens(d_out_at + DIM_V, out_token, query_number, length, DIM_V, PAD_V, SIZE)
            by_bias = tl.dot(b_ts, d_time_block, by_bias, input_precision=PRECISION)
            d_score_at += 2 * DIM_V
        else:
            scores += b_pos + b_ts
        d_out_block = load_tokens(d_score_at, out_token, query_number, length, DIM_V, PAD_V, SIZE)
        weights, slope = silu_and_slope(scores)
        weights = tl.where(seen, weights, 0.0)
        by_score = tl.dot(weights.to(d_out_block.dtype), d_out_block, by_score, input_precision=PRECISION)
        d_scores = score_gradients(v_block, d_out_block, slope, seen, PRECISION)
        total_k = tl.dot(d_scores.to(q_block.dtype), q_block, total_k, input_precision=PRECISION)
    d_k_at, d_v_at = d_k + first * d_k_token + head * DIM_QK, d_v + first * d_v_token + head * DIM_V
    store_tokens(d_k_at, d_k_token, total_k / max_length, number, length, DIM_QK, PAD_QK, SIZE)
    total_v = by_score / max_length + by_bias if THREE else by_score / max_length
    store_tokens(d_v_at, d_v_token, total_v, number, length, DIM_V, PAD_V, SIZE)


@triton.jit
def tiles_kernel(
    q, k, v, d_out, by_diagonal, by_bucket, w_pos, w_ts, buckets, blocks, pairs,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    num_heads, max_length,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, PAD_QK: tl.constexpr, PAD_V: tl.constexpr,
    SIZE: tl.constexpr, THREE: tl.constexpr, PRECISION: tl.constexpr, NUM_BUCKETS: tl.constexpr,
):  # fmt: skip
    """Sums the gradients of a tile's weights of position and time: over heads in order, then by diagonal and bucket."""
    pair = tl.program_id(0)
    block, distance = tl.load(pairs + pair * 2), tl.load(pairs + pair * 2 + 1)
    number, first, length, first_tile = load_block(blocks, block)
    key_number = number - distance
    b_pos, b_ts, bucket = load_weights(w_pos, w_ts, buckets, first_tile, number, key_number, max_length, SIZE)
    d_position = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    d_time = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    q += first * q_token
    k += first * k_token
    v += first * v_token
    d_out += first * out_token
    for head in range(tl.where(length > 0, num_heads, 0)):  # a padding tile has no heads to sum
        v_block = load_tokens(v + head * v_head, v_token, key_number, length, DIM_V, PAD_V, SIZE)
        d_out_block = load_tokens(d_out + head * out_head, out_token, number, length, DIM_V, PAD_V, SIZE)
        if THREE:
            d_position = tl.dot(v_block, tl.trans(d_out_block), d_position, input_precision=PRECISION)
            d_time_block = load_tokens(d_out + head * out_head + DIM_V, out_token, number, length, DIM_V, PAD_V, SIZE)
            d_time = tl.dot(v_block, tl.trans(d_time_block), d_time, input_precision=PRECISION)
        else:
            q_block = load_tokens(q + head * q_head, q_token, number, length, DIM_QK, PAD_QK, SIZE)
            k_block = load_tokens(k + head * k_head, k_token, key_number, length, DIM_QK, PAD_QK, SIZE)
            _, slope = silu_and_slope(tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION) + (b_pos + b_ts))
            d_position += tl.dot(v_block, tl.trans(d_out_block), input_precision=PRECISION) * slope
    seen = is_seen(number, key_number, SIZE)
    d_position = tl.where(seen, d_position, 0.0)
    if THREE:
        d_time = tl.where(seen, d_time, 0.0)
    else:
        d_position /= max_length
        d_time = d_position
    _sum_diagonals(by_diagonal + pair.to(tl.int64) * (2 * SIZE), d_position, SIZE)
    _sum_buckets(by_bucket + pair.to(tl.int64) * NUM_BUCKETS, d_time, bucket, NUM_BUCKETS)


@triton.jit
def _sum_diagonals(sums, tile, SIZE: tl.constexpr):
    """Stores the sum of each diagonal, [2 * SIZE]. On diagonal d, at SIZE + d, the key's place is the query's + d."""
    keys, diagonals = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    turned = tl.gather(tile, (keys - diagonals + SIZE) % SIZE, axis=1)
    tl.store(sums + SIZE + tl.arange(0, SIZE), tl.sum(tl.where(keys >= diagonals, turned, 0.0), axis=0))
    tl.store(sums + tl.arange(0, SIZE), tl.sum(tl.where(keys >= diagonals, 0.0, turned), axis=0))


@triton.jit
def _sum_buckets(sums, tile, bucket, NUM_BUCKETS: tl.constexpr):
    """Stores the sum of each bucket, in one pass over the tile for each: atomic additions would come in any order."""
    numbers = tl.arange(0, 256)
    totals = tl.zeros((256,), dtype=tl.float32)
    bucket = bucket.to(tl.int32)
    for number in range(tl.min(bucket), tl.max(bucket) + 1):
        totals = tl.where(numbers == number, tl.sum(tl.where(bucket == number, tile, 0.0)), totals)
    tl.store(sums + numbers, totals, mask=numbers < NUM_BUCKETS)


@triton.jit
def positions_kernel(d_pos, by_diagonal, starts, max_length, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Sums the gradients of w_pos for SIZE distances between tokens, over all tiles in order.

    Two neighbouring distances between blocks contain these distances: the tiles of one are summed, then of the other.
    """
    distance = tl.program_id(0)
    places = tl.arange(0, SIZE)
    near = _sum_column(by_diagonal, tl.load(starts + distance), tl.load(starts + distance + 1), -places, ROWS, SIZE)
    far = _sum_column(
        by_diagonal, tl.load(starts + distance + 1), tl.load(starts + distance + 2), SIZE - places, ROWS, SIZE
    )
    back = distance * SIZE + places
    tl.store(d_pos + (max_length - 1) - back, near + far, mask=back < max_length)


@triton.jit
def _sum_column(by_diagonal, start, end, diagonals, ROWS: tl.constexpr, SIZE: tl.constexpr):
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for first in range(start, end, ROWS):
        pairs = first + tl.arange(0, ROWS)
        at = by_diagonal + pairs[:, None].to(tl.int64) * (2 * SIZE) + SIZE + diagonals[None, :]
        # Diagonal SIZE would belong to the next tile: place 0 has no second part.
        exists = (pairs < end)[:, None] & (diagonals < SIZE)[None, :]
        total += tl.sum(tl.load(at, mask=exists, other=0.0), axis=0)
    return total
