"""Tiles of arrays of rows, and launches of the kernels that work on them.

A tile is a few rows by a few columns. Its shape follows from the row's width alone, never from the number of rows, and
kernels are compiled without fused multiply-add. So a row's bits do not depend on what else is in the launch.
"""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels import launch as launches

MOST_COLUMNS = 128
_VECTOR_BYTES = 16
"""Bytes of the widest load of a thread."""
_OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def tile_of(tile, num_rows, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Returns the rows [BLOCK_ROWS] and columns [BLOCK_COLUMNS] of a tile, an int64, and which elements exist."""
    tiles_per_row: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    rows = tile // tiles_per_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    columns = tile % tiles_per_row * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return rows, columns, (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]


@triton.jit
def elements(array, rows, stride, columns, VECTOR: tl.constexpr):
    """Returns pointers to a tile of an array whose rows are stride * VECTOR elements apart.

    The product tells the compiler that rows start at multiples of VECTOR elements, so that it makes loads that wide.
    """
    return array + rows[:, None] * (stride * VECTOR) + columns[None, :]


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


class RowTiles:
    """Cuts an array of rows into tiles of about `size` elements."""

    def __init__(self, num_rows: int, width: int, size: int, most_columns: int = MOST_COLUMNS) -> None:
        self.num_rows = num_rows
        self.columns = min(power_of_two(width), most_columns)
        self.rows = max(1, size // self.columns)
        self.width = width

    def __len__(self) -> int:
        return -(-self.num_rows // self.rows) * -(-self.width // self.columns)

    @property
    def constants(self) -> dict[str, int]:
        return {"WIDTH": self.width, "BLOCK_ROWS": self.rows, "BLOCK_COLUMNS": self.columns}


def power_of_two(least: int) -> int:
    """Returns the smallest power of two that is at least this number."""
    return 1 << max(0, least - 1).bit_length()


def vector(width: int, *arrays: Tensor) -> int:
    """Returns how many elements a thread may load at once by widths and strides. Triton itself checks addresses."""
    most = _VECTOR_BYTES // arrays[0].itemsize
    return math.gcd(most, width, *(array.stride(0) for array in arrays))


def launch(kernel: Any, num_programs: int, *arguments: Any, **constants: int | None) -> None:
    """Launches a kernel as nestpipe.kernels.launch does, compiled without fused multiply-add."""
    launches.launch(kernel, num_programs, *arguments, **constants, **_OPTIONS)
