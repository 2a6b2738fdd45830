"""Kernels of attention: the backward for q, for k and v, and for the weights of position and time."""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803 (constants of kernels are upper case)

import triton
import triton.language as tl

from nestpipe.kernels.attention.parts import (
    is_seen,
    load_block,
    load_tokens,
    load_weights,
    silu_and_slope,
    store_tokens,
)


@triton.jit
def queries_kernel(
    q,
    k,
    v,
    d_out,
    d_q,
    w_pos,
    w_ts,
    buckets,
    blocks,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    d_q_token,
    num_heads,
    max_length,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr,
    PAD_V: tl.constexpr,
    SIZE: tl.constexpr,
    THREE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program for each block of queries and head; keys from the nearest block to the farthest."""
    head = tl.program_id(0) % num_heads
    number, first, length, first_tile = load_block(blocks, tl.program_id(0) // num_heads)
    of_q = load_tokens(q + first * q_token + head * q_head, q_token, number, length, DIM_QK, PAD_QK, SIZE)
    of_head_k, of_head_v = k + first * k_token + head * k_head, v + first * v_token + head * v_head
    of_head_out = d_out + first * out_token + head * out_head
    if THREE:
        of_head_out += 2 * DIM_V
    of_out = load_tokens(of_head_out, out_token, number, length, DIM_V, PAD_V, SIZE)
    total = tl.zeros((SIZE, PAD_QK), dtype=tl.float32)
    for distance in range(number + 1):
        key_number = number - distance
        of_k = load_tokens(of_head_k, k_token, key_number, length, DIM_QK, PAD_QK, SIZE)
        of_v = load_tokens(of_head_v, v_token, key_number, length, DIM_V, PAD_V, SIZE)
        scores = tl.dot(of_q, tl.trans(of_k), input_precision=PRECISION)
        if not THREE:
            b_pos, b_ts, _ = load_weights(w_pos, w_ts, buckets, first_tile, number, key_number, max_length, SIZE)
            scores += tl.trans(b_pos + b_ts)
        _, slope = silu_and_slope(scores)
        d_scores = tl.dot(of_out, tl.trans(of_v), input_precision=PRECISION) * slope
        d_scores = tl.where(tl.trans(is_seen(number, key_number, SIZE)), d_scores, 0.0)
        total = tl.dot(d_scores.to(of_k.dtype), of_k, total, input_precision=PRECISION)
    of_d_q = d_q + first * d_q_token + head * DIM_QK
    store_tokens(of_d_q, d_q_token, total / max_length, number, length, DIM_QK, PAD_QK, SIZE)


@triton.jit
def keys_kernel(
    q,
    k,
    v,
    d_out,
    d_k,
    d_v,
    w_pos,
    w_ts,
    buckets,
    blocks,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    d_k_token,
    d_v_token,
    num_heads,
    max_length,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr,
    PAD_V: tl.constexpr,
    SIZE: tl.constexpr,
    THREE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program for each block of keys and head; queries from the nearest block to the farthest."""
    head = tl.program_id(0) % num_heads
    number, first, length, first_tile = load_block(blocks, tl.program_id(0) // num_heads)
    of_k = load_tokens(k + first * k_token + head * k_head, k_token, number, length, DIM_QK, PAD_QK, SIZE)
    of_v = load_tokens(v + first * v_token + head * v_head, v_token, number, length, DIM_V, PAD_V, SIZE)
    of_head_q, of_head_out = q + first * q_token + head * q_head, d_out + first * out_token + head * out_head
    total_k = tl.zeros((SIZE, PAD_QK), dtype=tl.float32)
    by_score = tl.zeros((SIZE, PAD_V), dtype=tl.float32)
    by_bias = tl.zeros((SIZE, PAD_V), dtype=tl.float32)
    for distance in range(tl.cdiv(length, SIZE) - number):
        query_number = number + distance
        seen = is_seen(query_number, number, SIZE)
        b_pos, b_ts, _ = load_weights(w_pos, w_ts, buckets, first_tile, query_number, number, max_length, SIZE)
        of_q = load_tokens(of_head_q, q_token, query_number, length, DIM_QK, PAD_QK, SIZE)
        scores = tl.dot(of_k, tl.trans(of_q), input_precision=PRECISION)
        at_score = of_head_out
        if THREE:
            b_pos, b_ts = tl.where(seen, b_pos, 0.0).to(of_v.dtype), tl.where(seen, b_ts, 0.0).to(of_v.dtype)
            at_position = load_tokens(of_head_out, out_token, query_number, length, DIM_V, PAD_V, SIZE)
            by_bias = tl.dot(b_pos, at_position, by_bias, input_precision=PRECISION)
            at_time = load_tokens(of_head_out + DIM_V, out_token, query_number, length, DIM_V, PAD_V, SIZE)
            by_bias = tl.dot(b_ts, at_time, by_bias, input_precision=PRECISION)
            at_score += 2 * DIM_V
        else:
            scores += b_pos + b_ts
        of_out = load_tokens(at_score, out_token, query_number, length, DIM_V, PAD_V, SIZE)
        weights, slope = silu_and_slope(scores)
        weights = tl.where(seen, weights, 0.0)
        by_score = tl.dot(weights.to(of_out.dtype), of_out, by_score, input_precision=PRECISION)
        d_scores = tl.dot(of_v, tl.trans(of_out), input_precision=PRECISION) * slope
        d_scores = tl.where(seen, d_scores, 0.0)
        total_k = tl.dot(d_scores.to(of_q.dtype), of_q, total_k, input_precision=PRECISION)
    of_d_k, of_d_v = d_k + first * d_k_token + head * DIM_QK, d_v + first * d_v_token + head * DIM_V
    store_tokens(of_d_k, d_k_token, total_k / max_length, number, length, DIM_QK, PAD_QK, SIZE)
    total_v = by_score / max_length + by_bias if THREE else by_score / max_length
    store_tokens(of_d_v, d_v_token, total_v, number, length, DIM_V, PAD_V, SIZE)


@triton.jit
def tiles_kernel(
    q,
    k,
    v,
    d_out,
    by_diagonal,
    by_bucket,
    w_pos,
    w_ts,
    buckets,
    blocks,
    pairs,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    num_heads,
    max_length,
    DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr,
    PAD_QK: tl.constexpr,
    PAD_V: tl.constexpr,
    SIZE: tl.constexpr,
    THREE: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_BUCKETS: tl.constexpr,
):
    """A program for each tile: gradients of its weights of position and time, summed over heads in order, then along
    diagonals and for each bucket."""
    pair = tl.program_id(0)
    block, distance = tl.load(pairs + pair * 2), tl.load(pairs + pair * 2 + 1)
    number, first, length, first_tile = load_block(blocks, block)
    key_number = number - distance
    b_pos, b_ts, bucket = load_weights(w_pos, w_ts, buckets, first_tile, number, key_number, max_length, SIZE)
    of_position = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    of_time = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    q += first * q_token
    k += first * k_token
    v += first * v_token
    d_out += first * out_token
    for head in range(tl.where(length > 0, num_heads, 0)):  # none of a tile that fills up
        of_v = load_tokens(v + head * v_head, v_token, key_number, length, DIM_V, PAD_V, SIZE)
        of_out = load_tokens(d_out + head * out_head, out_token, number, length, DIM_V, PAD_V, SIZE)
        if THREE:
            of_position = tl.dot(of_v, tl.trans(of_out), of_position, input_precision=PRECISION)
            at_time = load_tokens(d_out + head * out_head + DIM_V, out_token, number, length, DIM_V, PAD_V, SIZE)
            of_time = tl.dot(of_v, tl.trans(at_time), of_time, input_precision=PRECISION)
        else:
            of_q = load_tokens(q + head * q_head, q_token, number, length, DIM_QK, PAD_QK, SIZE)
            of_k = load_tokens(k + head * k_head, k_token, key_number, length, DIM_QK, PAD_QK, SIZE)
            _, slope = silu_and_slope(tl.dot(of_k, tl.trans(of_q), input_precision=PRECISION) + (b_pos + b_ts))
            of_position += tl.dot(of_v, tl.trans(of_out), input_precision=PRECISION) * slope
    seen = is_seen(number, key_number, SIZE)
    of_position = tl.where(seen, of_position, 0.0)
    if THREE:
        of_time = tl.where(seen, of_time, 0.0)
    else:
        of_position /= max_length
        of_time = of_position
    _sum_diagonals(by_diagonal + pair.to(tl.int64) * (2 * SIZE), of_position, SIZE)
    _sum_buckets(by_bucket + pair.to(tl.int64) * NUM_BUCKETS, of_time, bucket, NUM_BUCKETS)


@triton.jit
def _sum_diagonals(sums, tile, SIZE: tl.constexpr):
    """[2 * SIZE]: diagonal d, where the key's place in its block is the query's + d, at SIZE + d."""
    keys, diagonals = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    turned = tl.gather(tile, (keys - diagonals + SIZE) % SIZE, axis=1)
    tl.store(sums + SIZE + tl.arange(0, SIZE), tl.sum(tl.where(keys >= diagonals, turned, 0.0), axis=0))
    tl.store(sums + tl.arange(0, SIZE), tl.sum(tl.where(keys >= diagonals, 0.0, turned), axis=0))


@triton.jit
def _sum_buckets(sums, tile, bucket, NUM_BUCKETS: tl.constexpr):
    """One pass over the tile for each bucket between its lowest and its highest: no atomic additions, which would come
    in any order."""
    numbers = tl.arange(0, 256)
    totals = tl.zeros((256,), dtype=tl.float32)
    bucket = bucket.to(tl.int32)
    for number in range(tl.min(bucket), tl.max(bucket) + 1):
        totals = tl.where(numbers == number, tl.sum(tl.where(bucket == number, tile, 0.0)), totals)
    tl.store(sums + numbers, totals, mask=numbers < NUM_BUCKETS)


@triton.jit
def positions_kernel(d_pos, by_diagonal, starts, max_length, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """A program for SIZE distances between tokens, which two neighbouring distances between blocks have: all tiles of
    the one in order, then those of the other."""
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
        # Diagonal SIZE would be the next tile's: place 0 has no second part.
        exists = (pairs < end)[:, None] & (diagonals < SIZE)[None, :]
        total += tl.sum(tl.load(at, mask=exists, other=0.0), axis=0)
    return total
