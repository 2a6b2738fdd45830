"""Losses and gradients that are not finite: the error, and norms of gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor

LATE_STEPS = 2
"""steps after which the host reads what a device found out about a step"""


class NonFiniteError(ArithmeticError):
    """A loss or gradient was not finite; nothing of that step was applied to rows."""


def found_late(number: int) -> NonFiniteError:
    """Returns the error for a step that a device found not finite while the host went on."""
    return NonFiniteError(
        f"step {number}: a loss or a gradient is not finite on some rank; no row was changed by this step or after it, "
        "but the dense parameters were: go on from a checkpoint. Lower the learning rate, clip gradients, or look for "
        "bad inputs in this batch"
    )


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squares, added up in double."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total = total + gradient.double().square().sum()
    return total
