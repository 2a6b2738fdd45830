"""Losses and gradients that are not finite: how they are found, and what is said of them."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

LATE_STEPS = 2
"""how many steps after it the host hears of what a device found out about a step"""


class NonFiniteError(ArithmeticError):
    """A loss or gradient was not finite; nothing of that step was applied to rows."""


def found_late(number: int) -> NonFiniteError:
    """By a device, while the host went on."""
    return NonFiniteError(
        f"step {number}: a loss or a gradient is not finite on some rank; no row was changed by this step or after it, "
        "but the dense parameters were: go on from a checkpoint. Lower the learning rate, clip gradients, or look for "
        "bad inputs in this batch"
    )


def finite(values: Tensor) -> Tensor:
    """Neither infinite nor not a number: one bool. In one pass and without temporaries, unlike isfinite of all."""
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(values.aminmax()).isfinite().all()


def all_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The same of many small ones, in few launches: the largest number is not finite if any is not. Of one dtype they
    should be, or each one's largest is cast. There may be none, on a rank without samples."""
    some = [tensor for tensor in tensors if tensor.numel() > 0]
    if not some:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.nn.utils.get_total_norm(some, math.inf) < math.inf


def are_finite(values: Tensor) -> bool:
    return bool(finite(values))


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Added up in double."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total = total + gradient.double().square().sum()
    return total
