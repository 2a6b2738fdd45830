"""One answer about many tensors, the fastest way on each kind of device."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator


def all_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns one bool: whether no element is infinite or not a number. There may be no tensor.

    On an accelerator in few launches, however many tensors there are: the largest magnitude is finite if all are. In
    host memory in one pass over each, without temporaries.
    """
    some = [tensor for tensor in tensors if tensor.numel() > 0]
    if not some:
        return torch.ones((), dtype=torch.bool, device=device)
    if is_accelerator(device):
        return torch.nn.utils.get_total_norm(some, math.inf) < math.inf
    return torch.stack([bound.double() for tensor in some for bound in tensor.aminmax()]).isfinite().all()


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squares of all elements, added up in double."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total = total + gradient.double().square().sum()
    return total
