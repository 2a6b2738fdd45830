"""Kernels of layer norm and its backward. A program works on a few whole rows."""

import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels.launch import launch

_SIZE = 2048
"""Elements of a tile."""
_NUM_WARPS = 4


@triton.jit
def load_rows(array, rows, stride, columns, inside):
    return tl.load(array + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(array, rows, stride, columns, inside, values):
    tl.store(array + rows[:, None] * stride + columns[None, :], values.to(array.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x, gate, out, means, scales, num_rows, x_stride, gate_stride, out_stride, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    values = load_rows(x, rows, x_stride, columns, inside)
    mean = tl.sum(values, axis=1) / WIDTH
    centred = tl.where(inside, values - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / WIDTH + eps)
    result = centred * scale[:, None]
    if gate is not None:
        result = result * load_rows(gate, rows, gate_stride, columns, inside)
    store_rows(out, rows, out_stride, columns, inside, result)
    tl.store(means + rows, mean, mask=rows < num_rows)
    tl.store(scales + rows, scale, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def norm_backward_kernel(
    d_out, x, gate, means, scales, added, d_x, d_gate, num_rows, d_out_stride, x_stride, gate_stride, d_gate_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    mean = tl.load(means + rows, mask=rows < num_rows, other=0.0)
    scale = tl.load(scales + rows, mask=rows < num_rows, other=0.0)
    normed = tl.where(inside, load_rows(x, rows, x_stride, columns, inside) - mean[:, None], 0.0) * scale[:, None]
    slope = load_rows(d_out, rows, d_out_stride, columns, inside)
    if gate is not None:
        store_rows(d_gate, rows, d_gate_stride, columns, inside, slope * normed)
        slope = slope * load_rows(gate, rows, gate_stride, columns, inside)
    along_ones = tl.sum(slope, axis=1) / WIDTH
    along_normed = tl.sum(slope * normed, axis=1) / WIDTH
    result = scale[:, None] * (slope - along_ones[:, None] - normed * along_normed[:, None])
    if added is not None:
        result = result + load_rows(added, rows, WIDTH, columns, inside)
    store_rows(d_x, rows, WIDTH, columns, inside, result)


def norm(x: Tensor, gate: Tensor | None, out: Tensor, means: Tensor, scales: Tensor, eps: float) -> None:
    strides = x.stride(0), 0 if gate is None else gate.stride(0), out.stride(0)
    num_programs, constants = _tiles(*x.shape)
    launch(norm_kernel, num_programs, x, gate, out, means, scales, len(x), *strides, eps, **constants)


def norm_backward(
    d_out: Tensor,
    x: Tensor,
    gate: Tensor | None,
    means: Tensor,
    scales: Tensor,
    added: Tensor | None,
    d_x: Tensor,
    d_gate: Tensor | None,
) -> None:
    gate_strides = (0, 0) if gate is None or d_gate is None else (gate.stride(0), d_gate.stride(0))
    arrays = d_out, x, gate, means, scales, added, d_x, d_gate
    strides = d_out.stride(0), x.stride(0), *gate_strides
    num_programs, constants = _tiles(*x.shape)
    launch(norm_backward_kernel, num_programs, *arrays, len(x), *strides, **constants)


def _tiles(num_rows: int, width: int) -> tuple[int, dict[str, int]]:
    columns = triton.next_power_of_2(width)
    rows = max(1, _SIZE // columns)
    return -(-num_rows // rows), {"WIDTH": width, "ROWS": rows, "COLUMNS": columns, "num_warps": _NUM_WARPS}
