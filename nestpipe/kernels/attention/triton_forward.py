"""Kernels of attention: the buckets of time, and the forward."""

import triton
import triton.language as tl

from nestpipe.kernels.attention.triton_blocks import (
    FIELDS,
    is_seen,
    load_block,
    load_block_and_head,
    load_tokens,
    load_weights,
    store_tokens,
    tile_offset,
)


@triton.jit
def buckets_kernel(buckets, times, bounds, blocks, pairs, max_length, NUM_BOUNDS: tl.constexpr, SIZE: tl.constexpr):
    """Finds the buckets of a tile: the number of bounds up to a difference, which is below 256, by bisection."""
    pair = tl.program_id(0)
    block, distance = tl.load(pairs + pair * 2), tl.load(pairs + pair * 2 + 1)
    number, _, length, first_tile = load_block(blocks, block)
    sample_times = times + tl.load(blocks + block * FIELDS + 4).to(tl.int64) * (max_length + 1)
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    # A query knows the time of the next item. Padding has the time of the target.
    query_times = tl.load(sample_times + tl.minimum(number * SIZE + rows + 1, length))
    key_times = tl.load(sample_times + tl.minimum((number - distance) * SIZE + columns, length))
    difference = tl.abs(query_times - key_times)
    bucket = tl.zeros((SIZE, SIZE), dtype=tl.int32)
    for power in tl.static_range(8):
        next_bound = bucket + ((128 >> power) - 1)
        exists = next_bound < NUM_BOUNDS
        bound = tl.load(bounds + next_bound, mask=exists, other=0)
        bucket += tl.where(exists & (bound <= difference), 128 >> power, 0)
    offset = tile_offset(first_tile, number, number - distance, SIZE)
    tl.store(buckets + offset + rows * SIZE + columns, bucket.to(tl.uint8))


@triton.jit
def forward_kernel(
    q, k, v, out, w_pos, w_ts, buckets, blocks,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    num_heads, max_length,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, PAD_QK: tl.constexpr, PAD_V: tl.constexpr,
    SIZE: tl.constexpr, THREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the output of one block of queries and one head, over keys from the nearest block to the farthest."""
    head, number, first, length, first_tile = load_block_and_head(blocks, num_heads)
    q_block = load_tokens(q + first * q_token + head * q_head, q_token, number, length, DIM_QK, PAD_QK, SIZE)
    k_at, v_at = k + first * k_token + head * k_head, v + first * v_token + head * v_head
    by_score = tl.zeros((SIZE, PAD_V), dtype=tl.float32)
    by_position = tl.zeros((SIZE, PAD_V), dtype=tl.float32)
    by_time = tl.zeros((SIZE, PAD_V), dtype=tl.float32)
    for distance in range(number + 1):
        key_number = number - distance
        k_block = load_tokens(k_at, k_token, key_number, length, DIM_QK, PAD_QK, SIZE)
        v_block = load_tokens(v_at, v_token, key_number, length, DIM_V, PAD_V, SIZE)
        b_pos, b_ts, _ = load_weights(w_pos, w_ts, buckets, first_tile, number, key_number, max_length, SIZE)
        seen = tl.trans(is_seen(number, key_number, SIZE))
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
        if THREE:
            b_pos, b_ts = tl.where(seen, tl.trans(b_pos), 0.0), tl.where(seen, tl.trans(b_ts), 0.0)
            by_position = tl.dot(b_pos.to(v_block.dtype), v_block, by_position, input_precision=PRECISION)
            by_time = tl.dot(b_ts.to(v_block.dtype), v_block, by_time, input_precision=PRECISION)
        else:
            scores += tl.trans(b_pos + b_ts)
        weights = tl.where(seen, scores * tl.sigmoid(scores), 0.0)
        by_score = tl.dot(weights.to(v_block.dtype), v_block, by_score, input_precision=PRECISION)
    out_at = out + first * out_token + head * out_head
    if THREE:
        store_tokens(out_at, out_token, by_position, number, length, DIM_V, PAD_V, SIZE)
        store_tokens(out_at + DIM_V, out_token, by_time, number, length, DIM_V, PAD_V, SIZE)
        out_at += 2 * DIM_V
    store_tokens(out_at, out_token, by_score / max_length, number, length, DIM_V, PAD_V, SIZE)
