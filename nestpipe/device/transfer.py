"""Host memory to the device and back, through pinned memory, which torch keeps and hands out again."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from nestpipe.device.streams import finish, has_streams

ALIGNMENT = 16


class OfTensors(Protocol):
    def map(self, function: Callable[[Tensor], Tensor], /) -> Self:
        """The same of other tensors."""


T = TypeVar("T", bound=OfTensors)


def uploaded(value: T, device: torch.device) -> T:
    """With all its tensors on the device, copied in one piece."""
    if not has_streams(device):
        return value
    tensors: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    value.map(see)
    return value.map(upload(tensors, device))


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory that the device can copy from and to while threads go on."""
    return torch.empty(shape, dtype=dtype, pin_memory=has_streams(device))


def upload(tensors: Iterable[Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Begins to copy these to the device, in this thread's stream and in one piece; each is then found by the original.
    Those that are there already stay."""
    originals = {id(tensor): tensor for tensor in tensors if tensor.device != device}
    if not originals:
        return lambda tensor: tensor
    ends = list(accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in originals.values()))
    staged = host_empty((ends[-1],), torch.uint8, device)
    for tensor, end in zip(originals.values(), ends, strict=True):
        _piece(staged, tensor, end).copy_(tensor)
    there = staged.to(device, non_blocking=True)
    copies = {name: _piece(there, tensor, end) for (name, tensor), end in zip(originals.items(), ends, strict=True)}
    return lambda tensor: copies.get(id(tensor), tensor)


def _piece(memory: Tensor, tensor: Tensor, end: int) -> Tensor:
    """Where the tensor lies."""
    first = end - -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def download(tensor: Tensor) -> Tensor:
    """In host memory. This thread waits for it."""
    if not has_streams(tensor.device):
        return tensor
    here = host_empty(tuple(tensor.shape), tensor.dtype, tensor.device)
    here.copy_(tensor, non_blocking=True)
    finish(tensor.device)
    return here
