"""Kernels that add to each token the row of its place in its sample, and their backward."""

import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels.attention.tiles import Tiles
from nestpipe.kernels.attention.triton_blocks import FIELDS, load_block
from nestpipe.kernels.launch import launch

_COLUMNS = 128
_PLACES = 16
"""Places whose gradients one program sums: few, so that there are enough programs."""


@triton.jit
def add_kernel(
    out, values, positions, blocks, scale,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds positions to one block of tokens, COLUMNS columns of it."""
    tiles_per_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    number, first, length, _ = load_block(blocks, tl.program_id(0) // tiles_per_row)
    places = number * SIZE + tl.arange(0, SIZE)
    columns = tl.program_id(0) % tiles_per_row * COLUMNS + tl.arange(0, COLUMNS)
    inside = (places < length)[:, None] & (columns < WIDTH)[None, :]
    at = (first + places)[:, None] * WIDTH + columns[None, :]
    row = tl.load(positions + places[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    tl.store(out + at, scale * tl.load(values + at, mask=inside, other=0.0) + row, mask=inside)


@triton.jit(do_not_specialize=["num_blocks"])
def sum_kernel(
    d_positions, gradient, blocks, num_blocks,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums the gradients of PLACES places, COLUMNS columns of them, over all samples in order."""
    tiles_per_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    first_place = tl.program_id(0) // tiles_per_row * PLACES
    places = first_place + tl.arange(0, PLACES)
    columns = tl.program_id(0) % tiles_per_row * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PLACES, COLUMNS), dtype=tl.float32)
    for block in range(num_blocks):
        fields = blocks + block * FIELDS
        length = tl.load(fields + 2)
        if (tl.load(fields) == first_place // SIZE) & (first_place < length):
            inside = (places < length)[:, None] & (columns < WIDTH)[None, :]
            at = (tl.load(fields + 1).to(tl.int64) + places)[:, None] * WIDTH + columns[None, :]
            total += tl.load(gradient + at, mask=inside, other=0.0)
    tl.store(d_positions + places[:, None] * WIDTH + columns[None, :], total, mask=(columns < WIDTH)[None, :])


def add(out: Tensor, values: Tensor, positions: Tensor, tiles: Tiles, scale: float) -> None:
    width = values.shape[1]
    num_programs = tiles.num_blocks * -(-width // _COLUMNS)
    constants = {"WIDTH": width, "SIZE": tiles.size, "COLUMNS": _COLUMNS}
    launch(add_kernel, num_programs, out, values, positions, tiles.blocks, scale, **constants)


def sum_by_place(d_positions: Tensor, gradient: Tensor, tiles: Tiles) -> None:
    """Writes a row of d_positions for each place of most_blocks whole blocks."""
    width = gradient.shape[1]
    num_programs = tiles.most_blocks * (tiles.size // _PLACES) * -(-width // _COLUMNS)
    constants = {"WIDTH": width, "SIZE": tiles.size, "PLACES": _PLACES, "COLUMNS": _COLUMNS}
    launch(sum_kernel, num_programs, d_positions, gradient, tiles.blocks, tiles.num_blocks, **constants)
