"""Copies between host memory and a device through pinned memory, which torch caches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from nestpipe.device.streams import Mark, finish, is_accelerator, mark

ALIGNMENT = 16
"""Bytes that a device reads at once: arrays and rows that begin at multiples of it are read fastest."""


class OfTensors(Protocol):
    """A value made of tensors."""

    def map(self, function: Callable[[Tensor], Tensor], /) -> Self:
        """Returns the same value with function(tensor) in place of each tensor."""


T = TypeVar("T", bound=OfTensors)


def uploaded(value: T, device: torch.device) -> T:
    """Returns the value with all its tensors on the device. The tensors of each dtype are copied in one piece."""
    if not is_accelerator(device):
        return value
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    value.map(collect)
    return value.map(upload(tensors, device))


def uploaded_inputs(parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> list[Mapping[str, Tensor]]:
    """Returns the inputs of micro-batches on the device."""
    if not is_accelerator(device):
        return list(parts)
    copy = upload([value for part in parts for value in part.values()], device)
    return [{name: copy(value) for name, value in part.items()} for part in parts]


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns uninitialised host memory, pinned if the device is an accelerator, so that copies are asynchronous."""
    return torch.empty(shape, dtype=dtype, pin_memory=is_accelerator(device))


def upload(tensors: Iterable[Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Begins to copy tensors to the device, in this thread's stream and all of a dtype in one piece.

    Returns a function from a tensor to its copy. Tensors that are on the device already are not copied.
    """
    originals = {id(tensor): tensor for tensor in tensors if tensor.device != device}
    copies: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in originals.values()}:
        copies |= _upload({name: t for name, t in originals.items() if t.dtype == dtype}, dtype, device)
    return lambda tensor: copies.get(id(tensor), tensor)


def _upload(originals: dict[int, Tensor], dtype: torch.dtype, device: torch.device) -> dict[int, Tensor]:
    """Copies all tensors in few calls: a thread that makes many small calls keeps others from launching kernels."""
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


def host_bytes(device: torch.device) -> Callable[[int], Tensor]:
    """Returns a function that returns bytes of host memory, from which copies to the device are fastest."""
    return lambda number: host_empty((number,), torch.uint8, device)


class Download:
    """Tensors on their way from a device to host memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begins to copy them, those of each dtype in one piece."""
        self._tensors = list(tensors)
        self._copies: dict[torch.dtype, Tensor] = {}
        self._copied: Mark = None
        self._device = tensors[0].device if tensors else torch.device("cpu")
        if is_accelerator(self._device):
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                joined = torch.cat([tensor for tensor in tensors if tensor.dtype == dtype])
                host = host_empty(tuple(joined.shape), dtype, self._device)
                self._copies[dtype] = host.copy_(joined, non_blocking=True)
            self._copied = mark(self._device)

    def wait(self) -> list[Tensor]:
        """Returns the copies. This thread waits for them."""
        if self._copied is None:
            return self._tensors
        self._copied.synchronize()
        firsts = dict.fromkeys(self._copies, 0)
        copies = []
        for tensor in self._tensors:
            first = firsts[tensor.dtype]
            firsts[tensor.dtype] = end = first + tensor.numel()
            copies.append(self._copies[tensor.dtype][first:end])
        return copies


def download(tensor: Tensor) -> Tensor:
    """Returns the tensor in host memory. This thread waits for the copy."""
    if not is_accelerator(tensor.device):
        return tensor
    host = host_empty(tuple(tensor.shape), tensor.dtype, tensor.device)
    host.copy_(tensor, non_blocking=True)
    finish(tensor.device)
    return host
