"""Kernels of the row optimizers: one pass over rows, row state and gradients, with IEEE division and square root.

Constants are float64, and so is what is computed from them alone (1 - beta). Each is then rounded once to the rows'
dtype, as in the native library.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels.rows.reference import LANES
from nestpipe.kernels.rows.triton_copy import places_of
from nestpipe.kernels.triton_tiles import RowTiles, elements, launch, tile_of, vector

_SIZE = 2048
_NUM_WARPS = 4
_ROWWISE_SIZE, _ROWWISE_WARPS = 1024, 1
"""Row-wise Adagrad adds up each row. With the size and the warps of the others it takes up to 1.7 times as long."""
_COUNTS = ["num_rows", "row_stride", "state_stride", "gradient_stride"]


@triton.jit
def divide(a, b):
    # For float32 the operator would be off by up to 2 units in the last place.
    return tl.math.div_rn(a, b) if a.dtype == tl.float32 else a / b


@triton.jit
def root(a):
    return tl.math.sqrt_rn(a) if a.dtype == tl.float32 else tl.sqrt(a)


@triton.jit
def rounded(number, array):
    return tl.full((), number, array.dtype.element_ty)


@triton.jit
def divisor(sums, eps):
    """Returns sqrt(sums) + eps, or infinity where that is zero, so that the row does not change there."""
    total = root(sums) + eps
    return tl.where(total == 0.0, float("inf"), total)


@triton.jit
def if_applied(inside, is_masked):
    """Returns the elements to update: none in a masked step."""
    return inside if is_masked is None else inside & (tl.load(is_masked) == 0)


@triton.jit
def load_gradient(
    rows, gradient, slots, is_masked, num_rows, row_stride, gradient_stride,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns, for this program's tile, slots, columns, elements to update, pointers to rows, and gradients."""
    numbers, columns, inside = tile_of(tl.program_id(0).to(tl.int64), num_rows, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS)
    inside = if_applied(inside, is_masked)
    tile_slots = places_of(numbers, slots, num_rows)
    at = elements(rows, tile_slots, row_stride, columns, VECTOR)
    g = tl.load(elements(gradient, numbers, gradient_stride, columns, VECTOR), mask=inside)
    return tile_slots, columns, inside, at, g


@triton.jit(do_not_specialize=_COUNTS)
def sgd_kernel(
    rows, gradient, slots, is_masked, num_rows, row_stride, gradient_stride,
    lr: tl.float64,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    _, _, inside, at, g = load_gradient(
        rows, gradient, slots, is_masked, num_rows, row_stride, gradient_stride,
        VECTOR, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS,
    )  # fmt: skip
    tl.store(at, tl.load(at, mask=inside) - rounded(lr, rows) * g, mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def adagrad_kernel(
    rows, state, gradient, slots, is_masked, num_rows, row_stride, state_stride, gradient_stride,
    lr: tl.float64, eps: tl.float64,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    tile_slots, columns, inside, at, g = load_gradient(
        rows, gradient, slots, is_masked, num_rows, row_stride, gradient_stride,
        VECTOR, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS,
    )  # fmt: skip
    state_at = elements(state, tile_slots, state_stride, columns, VECTOR)
    sums = tl.load(state_at, mask=inside) + g * g
    change = divide(rounded(lr, rows) * g, divisor(sums, rounded(eps, rows)))
    tl.store(at, tl.load(at, mask=inside) - change, mask=inside)
    tl.store(state_at, sums, mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def adam_kernel(
    rows, state, gradient, slots, is_masked, num_rows, row_stride, state_stride, gradient_stride,
    beta1: tl.float64, beta2: tl.float64, step_size: tl.float64, eps: tl.float64,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    tile_slots, columns, inside, at, g = load_gradient(
        rows, gradient, slots, is_masked, num_rows, row_stride, gradient_stride,
        VECTOR, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS,
    )  # fmt: skip
    first_at = elements(state, tile_slots, state_stride, columns, VECTOR)
    second_at = first_at + WIDTH
    # 1 - beta would lose digits in float32.
    add1, add2 = rounded(1.0 - beta1, rows), rounded(1.0 - beta2, rows)
    first = rounded(beta1, rows) * tl.load(first_at, mask=inside) + add1 * g
    second = rounded(beta2, rows) * tl.load(second_at, mask=inside) + add2 * (g * g)
    change = divide(rounded(step_size, rows) * first, divisor(second, rounded(eps, rows)))
    tl.store(at, tl.load(at, mask=inside) - change, mask=inside)
    tl.store(first_at, first, mask=inside)
    tl.store(second_at, second, mask=inside)


@triton.jit
def sum_of_neighbours(x, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, LEVELS: tl.constexpr):
    """Returns [BLOCK_ROWS, 1]: sums neighbours, then sums of neighbours. The order of tl.sum depends on alignment."""
    for level in tl.static_range(LEVELS):
        a, b = tl.split(tl.reshape(x, (BLOCK_ROWS, BLOCK_COLUMNS >> (level + 1), 2)))
        x = a + b
    return x


@triton.jit(do_not_specialize=_COUNTS)
def rowwise_adagrad_kernel(
    rows, state, gradient, slots, is_masked, num_rows, row_stride, state_stride, gradient_stride,
    lr: tl.float64, eps: tl.float64,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    numbers = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = if_applied(numbers < num_rows, is_masked)[:, None]
    tile_slots = places_of(numbers, slots, num_rows)
    squares = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, rows.dtype.element_ty)
    g = squares
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        inside = exists & (columns < WIDTH)[None, :]
        g = tl.load(elements(gradient, numbers, gradient_stride, columns, VECTOR), mask=inside, other=0.0)
        squares = squares + g * g
    mean = divide(sum_of_neighbours(squares, BLOCK_ROWS, BLOCK_COLUMNS, LEVELS), rounded(WIDTH, rows))
    state_at = state + tile_slots[:, None] * state_stride
    sums = tl.load(state_at, mask=exists) + mean
    # Several threads hold the same element of state: all must have read it before one writes it.
    tl.debug_barrier()
    tl.store(state_at, sums, mask=exists)
    scale = divisor(sums, rounded(eps, rows))
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        inside = exists & (columns < WIDTH)[None, :]
        at = elements(rows, tile_slots, row_stride, columns, VECTOR)
        if WIDTH > BLOCK_COLUMNS:  # otherwise the whole row is loaded already
            g = tl.load(elements(gradient, numbers, gradient_stride, columns, VECTOR), mask=inside, other=0.0)
        tl.store(at, tl.load(at, mask=inside) - divide(rounded(lr, rows) * g, scale), mask=inside)


def sgd(rows: Tensor, gradient: Tensor, slots: Tensor | None, is_masked: Tensor | None, lr: float) -> None:
    _launch_by_element(sgd_kernel, (rows, gradient), slots, is_masked, lr)


def adagrad(
    rows: Tensor,
    state: Tensor,
    gradient: Tensor,
    slots: Tensor | None,
    is_masked: Tensor | None,
    lr: float,
    eps: float,
) -> None:
    _launch_by_element(adagrad_kernel, (rows, state, gradient), slots, is_masked, lr, eps)


def adam(
    rows: Tensor,
    state: Tensor,
    gradient: Tensor,
    slots: Tensor | None,
    is_masked: Tensor | None,
    beta1: float,
    beta2: float,
    step_size: float,
    eps: float,
) -> None:
    _launch_by_element(adam_kernel, (rows, state, gradient), slots, is_masked, beta1, beta2, step_size, eps)


def _launch_by_element(
    kernel: Any, arrays: tuple[Tensor, ...], slots: Tensor | None, is_masked: Tensor | None, *numbers: float
) -> None:
    """Launches a kernel that updates each element of rows on its own. The last of the arrays is the gradient."""
    num_rows, width = arrays[-1].shape
    tiles, wide = RowTiles(num_rows, width, _SIZE), vector(width, *arrays)
    strides = [array.stride(0) // wide for array in arrays]
    constants = {"VECTOR": wide, **tiles.constants, "num_warps": _NUM_WARPS}
    launch(kernel, len(tiles), *arrays, slots, is_masked, num_rows, *strides, *numbers, **constants)


def rowwise_adagrad(
    rows: Tensor,
    state: Tensor,
    gradient: Tensor,
    slots: Tensor | None,
    is_masked: Tensor | None,
    lr: float,
    eps: float,
) -> None:
    num_rows, width = gradient.shape
    tiles = RowTiles(num_rows, width, _ROWWISE_SIZE, most_columns=LANES)
    wide = vector(width, rows, gradient)
    strides = rows.stride(0) // wide, state.stride(0), gradient.stride(0) // wide
    constants = {"VECTOR": wide, **tiles.constants, "LEVELS": tiles.columns.bit_length() - 1}
    constants["num_warps"] = _ROWWISE_WARPS
    num_programs = -(-num_rows // tiles.rows)
    arrays = rows, state, gradient, slots, is_masked
    launch(rowwise_adagrad_kernel, num_programs, *arrays, num_rows, *strides, lr, eps, **constants)
