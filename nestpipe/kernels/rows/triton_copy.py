"""Kernels that copy, add and check rows, and one that fetches a list from pinned host memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels.triton_tiles import RowTiles, elements, larger, launch, tile_of, vector

_SIZE = 4096
"""Elements of a tile: each of 256 threads has 4 wide loads in flight, which a slow link to host memory needs."""
_NUM_WARPS = 8
_FETCHED_WORDS = 1024
"""Words that one program fetches: few, so that even a short list has several programs waiting for the link."""
_COUNTS = ["num_rows", "source_stride", "target_stride"]


@triton.jit
def places_of(rows, places, num_rows):
    """Returns the places of rows, which are the rows themselves if places is None."""
    return rows if places is None else tl.load(places + rows, mask=rows < num_rows, other=0)


@triton.jit
def store_if_large(values, inside, limit, exceeds):
    """Sets a flag if an element is NaN or too large. All programs that write it write the same."""
    magnitude = tl.abs(values)
    too_large = (inside & ~(magnitude <= tl.full((), limit, magnitude.dtype))).to(tl.int32)  # NaN compares false
    tl.store(exceeds, 1, mask=tl.reduce(tl.reduce(too_large, 1, larger), 0, larger) > 0)


@triton.jit(do_not_specialize=_COUNTS)
def copy_kernel(
    source, from_places, target, to_places, num_rows, source_stride, target_stride,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns, inside = tile_of(tl.program_id(0).to(tl.int64), num_rows, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS)
    from_rows = places_of(rows, from_places, num_rows)
    to_rows = places_of(rows, to_places, num_rows)
    values = tl.load(elements(source, from_rows, source_stride, columns, VECTOR), mask=inside)
    tl.store(elements(target, to_rows, target_stride, columns, VECTOR), values, mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def add_kernel(
    target, places, source, is_first, exceeds, num_rows, target_stride, source_stride, limit: tl.float64,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns, inside = tile_of(tl.program_id(0).to(tl.int64), num_rows, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS)
    at = elements(target, places_of(rows, places, num_rows), target_stride, columns, VECTOR)
    total = tl.load(elements(source, rows, source_stride, columns, VECTOR), mask=inside, other=0.0)
    if is_first is None:
        total = tl.load(at, mask=inside, other=0.0) + total
    else:
        is_later = (tl.load(is_first + rows, mask=rows < num_rows, other=1) == 0)[:, None]
        total = tl.where(is_later, tl.load(at, mask=inside & is_later, other=0.0) + total, total)
    tl.store(at, total, mask=inside)
    if exceeds is not None:
        store_if_large(total, inside, limit, exceeds)


@triton.jit(do_not_specialize=["num_rows", "stride"])
def large_kernel(
    array, exceeds, num_rows, stride, limit: tl.float64,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns, inside = tile_of(tl.program_id(0).to(tl.int64), num_rows, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS)
    values = tl.load(elements(array, rows, stride, columns, VECTOR), mask=inside, other=0.0)
    store_if_large(values, inside, limit, exceeds)


@triton.jit(do_not_specialize=["num_words"])
def fetch_kernel(source, target, num_words, SIZE: tl.constexpr):
    words = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = words < num_words
    tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


def copy_rows(
    source: Tensor, from_places: Tensor | None, target: Tensor, to_places: Tensor | None, num_rows: int
) -> None:
    width = source.shape[1]
    tiles, wide = RowTiles(num_rows, width, _SIZE), vector(width, source, target)
    launch(
        copy_kernel,
        len(tiles),
        source,
        from_places,
        target,
        to_places,
        num_rows,
        source.stride(0) // wide,
        target.stride(0) // wide,
        VECTOR=wide,
        **tiles.constants,
        num_warps=_NUM_WARPS,
    )


def add_rows(
    target: Tensor,
    places: Tensor | None,
    source: Tensor,
    is_first: Tensor | None,
    limit: float,
    exceeds: Tensor | None,
) -> None:
    num_rows, width = source.shape
    tiles, wide = RowTiles(num_rows, width, _SIZE), vector(width, source, target)
    strides = target.stride(0) // wide, source.stride(0) // wide
    constants = {"VECTOR": wide, **tiles.constants, "num_warps": _NUM_WARPS}
    arrays = target, places, source, None if is_first is None else is_first.view(torch.uint8), exceeds
    launch(add_kernel, len(tiles), *arrays, num_rows, *strides, limit, **constants)


def find_large(rows: Tensor, limit: float, exceeds: Tensor) -> None:
    num_rows, width = rows.shape
    tiles, wide = RowTiles(num_rows, width, _SIZE), vector(width, rows)
    constants = {"VECTOR": wide, **tiles.constants, "num_warps": _NUM_WARPS}
    launch(large_kernel, len(tiles), rows, exceeds, num_rows, rows.stride(0) // wide, limit, **constants)


def fetch(source: Tensor, target: Tensor) -> None:
    """Copies all of source, which is contiguous and int32 or int64, to target of the same shape."""
    words = source.view(-1).view(torch.int32)
    num_programs = -(-len(words) // _FETCHED_WORDS)
    launch(fetch_kernel, num_programs, words, target.view(-1).view(torch.int32), len(words), SIZE=_FETCHED_WORDS)
