"""Device functions that load rows, divide them by their lengths, and compute the gradient of that.

A vector shorter than SMALLEST_NORM is divided by SMALLEST_NORM.
"""

import triton
import triton.language as tl

from nestpipe.kernels.softmax.sampled_softmax import SMALLEST_NORM

SMALLEST = tl.constexpr(SMALLEST_NORM)


@triton.jit
def load_rows(array, rows, exists, DIM: tl.constexpr, PAD: tl.constexpr):
    """Returns [len(rows), PAD] in float32; zeros for rows that do not exist and in padding columns."""
    columns = tl.arange(0, PAD)
    inside = exists[:, None] & (columns < DIM)[None, :]
    return tl.load(array + rows[:, None] * DIM + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(array, rows, values, exists, DIM: tl.constexpr, PAD: tl.constexpr):
    columns = tl.arange(0, PAD)
    inside = exists[:, None] & (columns < DIM)[None, :]
    tl.store(array + rows[:, None] * DIM + columns[None, :], values, mask=inside)


@triton.jit
def norms(vectors):
    return tl.maximum(tl.math.sqrt_rn(tl.sum(vectors * vectors, axis=1)), SMALLEST)


@triton.jit
def divide(vectors, lengths):
    return vectors * tl.math.div_rn(tl.full(lengths.shape, 1.0, tl.float32), lengths)[:, None]


@triton.jit
def unit_backward(gradient, unit_vectors, lengths):
    """Returns the gradient of vectors from that of their unit vectors. Vectors that are too short were only scaled."""
    along = tl.where(lengths > SMALLEST, tl.sum(gradient * unit_vectors, axis=1), 0.0)
    return divide(gradient - along[:, None] * unit_vectors, lengths)
