"""The kernel that sums runs of entries, each in order."""

import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels.triton_tiles import RowTiles, elements, larger, launch, tile_of, vector

_SIZE = 1024
"""Elements of a tile: few runs, since all wait for the longest."""
_NUM_WARPS = 4
_COUNTS = ["num_runs", "num_values", "value_stride", "out_stride"]


@triton.jit
def run_bounds(runs, starts, ends, num_runs, SHORTEST: tl.constexpr, LONGEST: tl.constexpr):
    """Returns the first entry and the length of each run; length -1 if it does not exist or is left out."""
    exists = runs < num_runs
    if starts is None:
        first = runs
        length = tl.where(exists, 1, -1).to(tl.int64)
    else:
        first = tl.load(starts + runs, mask=exists, other=0)
        length = tl.load(ends + runs, mask=exists, other=-1) - first
    if SHORTEST > 0:
        length = tl.where(length >= SHORTEST, length, -1)
    if LONGEST is not None:
        length = tl.where(length <= LONGEST, length, -1)
    return first, length


@triton.jit(do_not_specialize=_COUNTS)
def sum_kernel(
    values, places, order, weights, weight_places, starts, ends, out, num_runs, num_values, value_stride, out_stride,
    SIZE: tl.constexpr, DISTANCE: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, VECTOR: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    runs, columns, inside = tile_of(tl.program_id(0).to(tl.int64), num_runs, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS)
    first, length = run_bounds(runs, starts, ends, num_runs, SHORTEST, LONGEST)
    longest = tl.reduce(length, 0, larger)
    total = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, out.dtype.element_ty)
    at_once: tl.constexpr = 1 if starts is None else 4
    i = tl.full((), 0, tl.int64)
    while i < longest:
        for _ in tl.static_range(at_once):  # so that their loads are in flight together
            entries = first + i
            exists = i < length
            if order is None:
                rows = entries
            else:
                rows = tl.load(order + entries, mask=exists, other=num_values)
                exists = exists & (rows < num_values)
            if places is not None:
                rows = tl.load(places + rows, mask=exists, other=0)
            if SIZE is not None:
                rows = rows // SIZE * DISTANCE + rows % SIZE
            present = exists[:, None] & (columns < WIDTH)[None, :]
            added = tl.load(elements(values, rows, value_stride, columns, VECTOR), mask=present, other=0.0)
            if weights is not None:
                if weight_places is not None:
                    entries = tl.load(weight_places + entries, mask=exists, other=0)
                added = tl.load(weights + entries, mask=exists, other=0.0)[:, None] * added
            total = total + added
            i += 1
    at = elements(out, runs, out_stride, columns, VECTOR)
    tl.store(at, total, mask=inside & (length >= 0)[:, None])


def sum_runs(
    values: Tensor,
    order: Tensor | None,
    weights: Tensor | None,
    weight_places: Tensor | None,
    bounds: tuple[Tensor, Tensor] | None,
    out: Tensor,
    num_runs: int,
    limits: tuple[int, int | None],
    spacing: tuple[int, int] | None,
    places: Tensor | None,
) -> None:
    """Sums runs as reference.sum_runs does. Rows of `out` of runs that are left out stay as they are."""
    width = values.shape[1]
    tiles, wide = RowTiles(num_runs, width, _SIZE), vector(width, values, out)
    starts, ends = bounds if bounds is not None else (None, None)
    size, distance = spacing if spacing is not None else (None, None)
    launch(
        sum_kernel,
        len(tiles),
        values,
        places,
        order,
        weights,
        weight_places,
        starts,
        ends,
        out,
        num_runs,
        len(values if places is None else places),
        values.stride(0) // wide,
        out.stride(0) // wide,
        SIZE=size,
        DISTANCE=distance,
        SHORTEST=limits[0],
        LONGEST=limits[1],
        VECTOR=wide,
        **tiles.constants,
        num_warps=_NUM_WARPS,
    )
