"""Scores that are whole numbers, so that their bits depend only on the user and the item.

Users and rows are scaled to a length of about 1 and rounded to multiples of 2^-26. Products of two such numbers are
multiples of 2^-52, and no sum of them reaches 2 (Cauchy-Schwarz). So float64 holds every sum exactly, in whatever order
a matrix product adds. In units of 2^-52, a score is a whole number below 2^53.

Rounding shifts a score by about as much as a product in float32 would. The score of an item does not depend on its
block, on threads or on the number of ranks, and equal rows have equal scores.
"""

import numpy as np
import torch
from torch import Tensor

UNITS = 2.0**26
"""Units in a length of 1."""
SMALLEST_LENGTH = 1e-6
"""Shorter rows are not scaled to length 1, as in the loss of the history models."""


def whole_users(users: Tensor) -> Tensor:
    """Scales each user by a power of two, which changes no rank, to a length of 0 or between 0.7 and 1.42."""
    users = users.double()
    fraction, exponent = np.frexp(lengths(users).numpy())
    exponent = exponent - (fraction < np.sqrt(0.5))  # so that a length just above 1 stays as it is
    return (users * _power_of_two(-exponent)[:, None] * UNITS).round_()


def whole_cosine_rows(rows: Tensor) -> Tensor:
    """Scales each row to length 1."""
    rows = rows.double()
    return (rows / lengths(rows).clamp_(min=SMALLEST_LENGTH)[:, None]).mul_(UNITS).round_()


def whole_rows(rows: Tensor, largest_length: float) -> Tensor:
    """Scales all rows by the power of two that makes the longest row of the corpus at most 1 long."""
    _, exponent = np.frexp(largest_length)
    return (rows.double() * (_power_of_two(-exponent) * UNITS)).round_()


def lengths(vectors: Tensor) -> Tensor:
    """Returns the lengths, [n]. Columns are added in a fixed order: the order of a reduction may depend on n."""
    squares = vectors.double().square()
    while (width := squares.shape[1]) > 1:
        half = width // 2
        pairs = squares[:, :half] + squares[:, half : 2 * half]
        squares = pairs if width % 2 == 0 else torch.cat([pairs, squares[:, -1:]], dim=1)
    return squares.flatten().sqrt()


def _power_of_two(exponent: object) -> Tensor:
    """Returns 2 ** exponent, exactly."""
    return torch.from_numpy(np.asarray(np.ldexp(1.0, np.asarray(exponent, dtype=np.int32))))
