"""Device functions that the kernels of attention share: blocks of tokens, weights of position and time, silu."""

import triton
import triton.language as tl

from nestpipe.kernels.attention.tiles import NUM_FIELDS

FIELDS = tl.constexpr(NUM_FIELDS)


@triton.jit
def load_block(blocks, block):
    """Returns the block's number in its sample, and of the sample the first token, the length and the first tile."""
    fields = blocks + block.to(tl.int64) * FIELDS
    return tl.load(fields), tl.load(fields + 1).to(tl.int64), tl.load(fields + 2), tl.load(fields + 3).to(tl.int64)


@triton.jit
def load_block_and_head(blocks, num_heads):
    """Returns the head of this program, and its block as load_block does."""
    head = tl.program_id(0) % num_heads
    number, first, length, first_tile = load_block(blocks, tl.program_id(0) // num_heads)
    return head, number, first, length, first_tile


@triton.jit
def load_tokens(x, stride, number, length, DIM: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr):
    """Returns [SIZE, PAD] of one block and head; zeros beyond the sample and in padding columns."""
    places = number * SIZE + tl.arange(0, SIZE)
    columns = tl.arange(0, PAD)
    at = x + places[:, None].to(tl.int64) * stride + columns[None, :]
    if DIM == PAD:
        return tl.load(at, mask=(places < length)[:, None], other=0.0)
    return tl.load(at, mask=(places < length)[:, None] & (columns < DIM)[None, :], other=0.0)


@triton.jit
def store_tokens(x, stride, values, number, length, DIM: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr):
    places = number * SIZE + tl.arange(0, SIZE)
    columns = tl.arange(0, PAD)
    at = x + places[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=(places < length)[:, None] & (columns < DIM)[None, :])


@triton.jit
def tile_offset(first_tile, query_number, key_number, SIZE: tl.constexpr):
    """Returns the offset of a tile's buckets."""
    row = query_number.to(tl.int64) * (query_number + 1) // 2
    return (first_tile + row + key_number) * (SIZE * SIZE)


@triton.jit
def load_weights(w_pos, w_ts, buckets, first_tile, query_number, key_number, max_length, SIZE: tl.constexpr):
    """Returns the weights of position and of time and the buckets of time, [SIZE, SIZE] each, keys by queries.

    Keys are rows, so that all three are read in the same order. w_pos has SIZE more weights on either side, for keys
    after their query and for padding.
    """
    keys, queries = tl.arange(0, SIZE)[:, None].to(tl.int64), tl.arange(0, SIZE)[None, :].to(tl.int64)
    bucket = tl.load(buckets + tile_offset(first_tile, query_number, key_number, SIZE) + queries * SIZE + keys)
    nearest = w_pos + (SIZE + max_length - 1 - (query_number - key_number) * SIZE)
    return tl.load(nearest + (keys - queries)), tl.load(w_ts + bucket.to(tl.int32)), bucket


@triton.jit
def is_seen(query_number, key_number, SIZE: tl.constexpr):
    """Returns [SIZE, SIZE], keys by queries: whether a key does not come after its query."""
    return (tl.arange(0, SIZE)[:, None] <= tl.arange(0, SIZE)[None, :]) | (query_number > key_number)


@triton.jit
def silu_and_slope(x):
    sigmoid = tl.sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


@triton.jit
def score_gradients(x, y, slope, seen, PRECISION: tl.constexpr):
    """Returns the gradients of scores, of which x and y are blocks of v and of the output's gradient, or reversed."""
    gradients = tl.dot(x, tl.trans(y), input_precision=PRECISION) * slope
    return tl.where(seen, gradients, 0.0)
