"""Host memory to the device and back, through pinned memory, which torch keeps and hands out again."""

from collections.abc import Callable, Iterable
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from nestpipe.device.streams import finish, is_accelerator

ALIGNMENT = 16


class OfTensors(Protocol):
    def map(self, function: Callable[[Tensor], Tensor], /) -> Self:
        """The same of other tensors."""


T = TypeVar("T", bound=OfTensors)


def uploaded(value: T, device: torch.device) -> T:
    """With all its tensors on the device, copied in one piece."""
    if not is_accelerator(device):
        return value
    tensors: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    value.map(see)
    return value.map(upload(tensors, device))


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory that the device can copy from and to while threads go on."""
    return torch.empty(shape, dtype=dtype, pin_memory=is_accelerator(device))


def upload(tensors: Iterable[Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Begins to copy these to the device, in this thread's stream, all of a dtype in one piece; each is then found by
    the original. Those that are there already stay."""
    originals = {id(tensor): tensor for tensor in tensors if tensor.device != device}
    copies: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in originals.values()}:
        copies |= _upload({name: t for name, t in originals.items() if t.dtype == dtype}, dtype, device)
    return lambda tensor: copies.get(id(tensor), tensor)


def _upload(originals: dict[int, Tensor], dtype: torch.dtype, device: torch.device) -> dict[int, Tensor]:
    """In few calls, however many they are: a thread that makes many small ones keeps others from launching kernels."""
    aligned = max(1, ALIGNMENT // dtype.itemsize)
    filling = torch.zeros(aligned, dtype=dtype)
    pieces = [piece for t in originals.values() for piece in (t.detach().reshape(-1), filling[: -t.numel() % aligned])]
    sizes = [piece.numel() for piece in pieces]
    staged = torch.cat(pieces, out=host_empty((sum(sizes),), dtype, device))
    parts = staged.to(device, non_blocking=True).split(sizes)[::2]
    return {
        name: part if original.dim() == 1 else part.view(original.shape)
        for (name, original), part in zip(originals.items(), parts, strict=True)
    }


def download(tensor: Tensor) -> Tensor:
    """In host memory. This thread waits for it."""
    if not is_accelerator(tensor.device):
        return tensor
    here = host_empty(tuple(tensor.shape), tensor.dtype, tensor.device)
    here.copy_(tensor, non_blocking=True)
    finish(tensor.device)
    return here
