"""Numbers on a device: the precision of a model's operations, and whether results are finite."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Returns a context in which torch computes in this dtype where it deems that safe."""
    return torch.autocast(device.type, dtype=dtype)


def all_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns one bool: whether no element of any tensor is infinite or NaN. It is true if there are no tensors.

    On an accelerator this takes few launches for any number of tensors: the largest magnitude is finite if all are. In
    host memory it takes one pass over each tensor, without temporaries.
    """
    non_empty = [tensor for tensor in tensors if tensor.numel() > 0]
    if not non_empty:
        return torch.ones((), dtype=torch.bool, device=device)
    if is_accelerator(device):
        return (torch.stack(torch._foreach_norm(non_empty, math.inf)) < math.inf).all()
    return torch.tensor(all(math.isfinite(bound) for tensor in non_empty for bound in tensor.aminmax()))


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squares of all elements, added up in double."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total = total + gradient.double().square().sum()
    return total
