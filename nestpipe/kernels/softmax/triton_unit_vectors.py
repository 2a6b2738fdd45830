"""Rows as vectors, and the same brought to length 1, with the gradient back: parts of kernels.

A vector shorter than SMALLEST_NORM is divided by that.
"""

import triton
import triton.language as tl

from nestpipe.kernels.softmax.sampled_softmax import SMALLEST_NORM

SMALLEST = tl.constexpr(SMALLEST_NORM)


@triton.jit
def load_rows(array, rows, exists, DIM: tl.constexpr, PAD: tl.constexpr):
    """[len(rows), PAD] in float32; zeros where there is nothing."""
    columns = tl.arange(0, PAD)
    inside = exists[:, None] & (columns < DIM)[None, :]
    return tl.load(array + rows[:, None] * DIM + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(array, rows, values, exists, DIM: tl.constexpr, PAD: tl.constexpr):
    columns = tl.arange(0, PAD)
    inside = exists[:, None] & (columns < DIM)[None, :]
    tl.store(array + rows[:, None] * DIM + columns[None, :], values, mask=inside)


@triton.jit
def lengths_of(vectors):
    return tl.maximum(tl.math.sqrt_rn(tl.sum(vectors * vectors, axis=1)), SMALLEST)


@triton.jit
def over(vectors, lengths):
    return vectors * tl.math.div_rn(tl.full(lengths.shape, 1.0, tl.float32), lengths)[:, None]


@triton.jit
def through_unit(gradient, unit_vectors, lengths):
    """The gradient of vectors whose unit vectors have this one. Vectors that are too short were only scaled."""
    along = tl.where(lengths > SMALLEST, tl.sum(gradient * unit_vectors, axis=1), 0.0)
    return over(gradient - along[:, None] * unit_vectors, lengths)
