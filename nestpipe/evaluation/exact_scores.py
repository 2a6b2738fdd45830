"""Scores that are whole numbers, so that their bits depend on nothing but the user and the item.

Users and rows are brought to a length of about 1 and rounded to multiples of 2^-26. The products of two such numbers
are multiples of 2^-52, and no sum of them reaches 2 (Cauchy and Schwarz), so that float64 holds every one of them
exactly, in whatever order a matrix product adds. Counted in units of 2^-52 a score is a whole number below 2^53.
Rounding shifts it by about what a product in float32 would; it cannot make the score of an item depend on the block it
is in, on threads or on the number of ranks, and equal rows have equal scores.
"""

import numpy as np
import torch
from torch import Tensor

UNITS = 2.0**26
"""in a length of 1"""
SMALLEST_LENGTH = 1e-6
"""rows that are shorter are not brought to length 1, as in the loss of the models of histories"""


def whole_users(users: Tensor) -> Tensor:
    """Scaled by a power of two each, which changes no rank: lengths are then 0, or between 0.7 and 1.42."""
    users = users.double()
    fraction, exponent = np.frexp(lengths(users).numpy())
    exponent = exponent - (fraction < np.sqrt(0.5))  # so that 1 and a little more stays what it is
    return (users * _power_of_two(-exponent)[:, None] * UNITS).round_()


def whole_cosine_rows(rows: Tensor) -> Tensor:
    """Brought to length 1."""
    rows = rows.double()
    return (rows / lengths(rows).clamp_(min=SMALLEST_LENGTH)[:, None]).mul_(UNITS).round_()


def whole_rows(rows: Tensor, largest_length: float) -> Tensor:
    """All scaled by the same power of two, which makes the longest row of the corpus at most 1 long."""
    _, exponent = np.frexp(largest_length)
    return (rows.double() * (_power_of_two(-exponent) * UNITS)).round_()


def lengths(vectors: Tensor) -> Tensor:
    """[n]. Added element by element, in an order that is that of the columns: a reduction's may depend on n."""
    squares = vectors.double().square()
    while (width := squares.shape[1]) > 1:
        half = width // 2
        pairs = squares[:, :half] + squares[:, half : 2 * half]
        squares = pairs if width % 2 == 0 else torch.cat([pairs, squares[:, -1:]], dim=1)
    return squares.flatten().sqrt()


def _power_of_two(exponent: object) -> Tensor:
    """Exactly."""
    return torch.from_numpy(np.asarray(np.ldexp(1.0, np.asarray(exponent, dtype=np.int32))))
