"""Kernels that cut long segments into pieces."""

import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels.launch import launch

_SIZE = 512
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_segments"])
def count_kernel(starts, ends, counts, num_segments, PIECE: tl.constexpr, SIZE: tl.constexpr):
    s = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = s < num_segments
    length = tl.load(ends + s, mask=inside, other=0) - tl.load(starts + s, mask=inside, other=0)
    tl.store(counts + s, tl.where(length > PIECE, (length + PIECE - 1) // PIECE, 0), mask=inside)


@triton.jit(do_not_specialize=["num_segments", "num_pieces", "levels"])
def piece_kernel(
    starts, ends, offsets, begins, piece_ends, num_segments, num_pieces, levels, PIECE: tl.constexpr, SIZE: tl.constexpr
):
    numbers = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = numbers < num_pieces
    exists = inside & (numbers < tl.load(offsets + num_segments))
    # The last segment whose pieces begin at this number or before it: short segments have none.
    segment = tl.full((SIZE,), 0, tl.int64)
    step = tl.full((), 1, tl.int64) << levels
    while step > 0:
        candidate = segment + step
        is_segment = exists & (candidate < num_segments)
        first = tl.load(offsets + candidate, mask=is_segment, other=0)
        segment = tl.where(is_segment & (first <= numbers), candidate, segment)
        step = step >> 1
    first = tl.load(offsets + segment, mask=exists, other=0)
    begin = tl.load(starts + segment, mask=exists, other=0) + PIECE * (numbers - first)
    end = tl.load(ends + segment, mask=exists, other=0)
    tl.store(begins + numbers, tl.where(exists, begin, 0), mask=inside)
    tl.store(piece_ends + numbers, tl.where(exists, tl.minimum(begin + PIECE, end), 0), mask=inside)


def count_pieces(starts: Tensor, ends: Tensor, size: int, counts: Tensor) -> None:
    if len(starts) > 0:
        _launch(count_kernel, len(starts), starts, ends, counts, len(starts), PIECE=size)


def find_pieces(starts: Tensor, ends: Tensor, offsets: Tensor, size: int, bounds: Tensor) -> None:
    number, num_segments = bounds.shape[1], len(starts)
    arrays = starts, ends, offsets, bounds[0], bounds[1]
    _launch(piece_kernel, number, *arrays, num_segments, number, num_segments.bit_length(), PIECE=size)


def _launch(kernel: object, number: int, *arguments: object, **constants: int) -> None:
    launch(kernel, -(-number // _SIZE), *arguments, SIZE=_SIZE, num_warps=_NUM_WARPS, **constants)
