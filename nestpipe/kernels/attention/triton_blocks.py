"""What the kernels of attention share: reading tokens, weights of position and time, silu."""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803 (constants of kernels are upper case)

import triton
import triton.language as tl

FIELDS = tl.constexpr(5)
"""columns of Tiles.blocks"""


@triton.jit
def load_block(blocks, block):
    """Number in its sample; of that, the first token, the length, the first tile."""
    fields = blocks + block.to(tl.int64) * FIELDS
    return tl.load(fields), tl.load(fields + 1).to(tl.int64), tl.load(fields + 2), tl.load(fields + 3).to(tl.int64)


@triton.jit
def load_tokens(x, stride, number, length, DIM: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr):
    """[SIZE, PAD] of one block and head; zeros behind the sample and in columns that fill up."""
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
def tile_at(first_tile, query_number, key_number, SIZE: tl.constexpr):
    """Where the buckets of a tile begin."""
    row = query_number.to(tl.int64) * (query_number + 1) // 2
    return (first_tile + row + key_number) * (SIZE * SIZE)


@triton.jit
def load_weights(w_pos, w_ts, buckets, first_tile, query_number, key_number, max_length, SIZE: tl.constexpr):
    """[SIZE, SIZE], keys by queries, of position and of time; and the buckets of time.

    Keys are rows, since so all three are read in the same order. w_pos has SIZE more weights on either side, for keys
    behind their query and tokens that fill up.
    """
    keys, queries = tl.arange(0, SIZE)[:, None].to(tl.int64), tl.arange(0, SIZE)[None, :].to(tl.int64)
    bucket = tl.load(buckets + tile_at(first_tile, query_number, key_number, SIZE) + queries * SIZE + keys)
    nearest = w_pos + (SIZE + max_length - 1 - (query_number - key_number) * SIZE)
    return tl.load(nearest + (keys - queries)), tl.load(w_ts + bucket.to(tl.int32)), bucket


@triton.jit
def is_seen(query_number, key_number, SIZE: tl.constexpr):
    """[SIZE, SIZE], keys by queries: whether a key does not lie behind its query."""
    return (tl.arange(0, SIZE)[:, None] <= tl.arange(0, SIZE)[None, :]) | (query_number > key_number)


@triton.jit
def silu_and_slope(x):
    sigmoid = tl.sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
