"""Kernels of attention: the buckets of time, and the forward."""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803 (constants of kernels are upper case)

import triton
import triton.language as tl

from nestpipe.kernels.attention.parts import (
    FIELDS,
    is_seen,
    load_block,
    load_tokens,
    load_weights,
    store_tokens,
    tile_at,
)


@triton.jit
def buckets_kernel(buckets, times, bounds, blocks, pairs, max_length, NUM_BOUNDS: tl.constexpr, SIZE: tl.constexpr):
    """A program for each tile. The number of bounds up to a difference is its bucket: below 256, found by bisection."""
    pair = tl.program_id(0)
    block, distance = tl.load(pairs + pair * 2), tl.load(pairs + pair * 2 + 1)
    number, _, length, first_tile = load_block(blocks, block)
    of_sample = times + tl.load(blocks + block * FIELDS + 4).to(tl.int64) * (max_length + 1)
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    # A query knows when the next item comes. A token that fills up has the time of the target.
    query_times = tl.load(of_sample + tl.minimum(number * SIZE + rows + 1, length))
    key_times = tl.load(of_sample + tl.minimum((number - distance) * SIZE + columns, length))
    difference = tl.abs(query_times - key_times)
    bucket = tl.zeros((SIZE, SIZE), dtype=tl.int32)
    for power in tl.static_range(8):
        next_bound = bucket + ((128 >> power) - 1)
        exists = next_bound < NUM_BOUNDS
        bound = tl.load(bounds + next_bound, mask=exists, other=0)
        bucket += tl.where(exists & (bound <= difference), 128 >> power, 0)
    at = tile_at(first_tile, number, number - distance, SIZE)
    tl.store(buckets + at + rows * SIZE + columns, bucket.to(tl.uint8))


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
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
    by_score = tl.zeros((SIZE, PAD_V), dtype=tl.float32)
    by_position = tl.zeros((SIZE, PAD_V), dtype=tl.float32)
    by_time = tl.zeros((SIZE, PAD_V), dtype=tl.float32)
    for distance in range(number + 1):
        key_number = number - distance
        of_k = load_tokens(of_head_k, k_token, key_number, length, DIM_QK, PAD_QK, SIZE)
        of_v = load_tokens(of_head_v, v_token, key_number, length, DIM_V, PAD_V, SIZE)
        b_pos, b_ts, _ = load_weights(w_pos, w_ts, buckets, first_tile, number, key_number, max_length, SIZE)
        seen = tl.trans(is_seen(number, key_number, SIZE))
        scores = tl.dot(of_q, tl.trans(of_k), input_precision=PRECISION)
        if THREE:
            b_pos, b_ts = tl.where(seen, tl.trans(b_pos), 0.0), tl.where(seen, tl.trans(b_ts), 0.0)
            by_position = tl.dot(b_pos.to(of_v.dtype), of_v, by_position, input_precision=PRECISION)
            by_time = tl.dot(b_ts.to(of_v.dtype), of_v, by_time, input_precision=PRECISION)
        else:
            scores += tl.trans(b_pos + b_ts)
        weights = tl.where(seen, scores * tl.sigmoid(scores), 0.0)
        by_score = tl.dot(weights.to(of_v.dtype), of_v, by_score, input_precision=PRECISION)
    of_out = out + first * out_token + head * out_head
    if THREE:
        store_tokens(of_out, out_token, by_position, number, length, DIM_V, PAD_V, SIZE)
        store_tokens(of_out + DIM_V, out_token, by_time, number, length, DIM_V, PAD_V, SIZE)
        of_out += 2 * DIM_V
    store_tokens(of_out, out_token, by_score / max_length, number, length, DIM_V, PAD_V, SIZE)
