"""Rows gathered, placed and added up, where they are: by torch in host memory, by kernels of our own on a device.

torch's own on a device would do, but for sums in a fixed order it sorts first. Here no place comes twice in a call.
"""

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator
from nestpipe.device.tally import embedding_memory
from nestpipe.embedding.memory import recycled
from nestpipe.kernels.rows import add_rows as add_on_device
from nestpipe.kernels.rows import copy_rows as copy_on_device
from nestpipe.store import copy_records


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that was used before, where that is faster."""
    out = torch.empty(shape, dtype=dtype, device=device) if is_accelerator(device) else recycled.empty(shape, dtype)
    embedding_memory.add(out)
    return out


def take_rows(source: Tensor, places: Tensor) -> Tensor:
    """source[places], in memory of its own."""
    out = empty_rows((len(places), source.shape[1]), source.dtype, source.device)
    if is_accelerator(source.device):
        copy_on_device(source, places, out, None)
        return out
    return torch.index_select(source, 0, places, out=out)


def add_rows(target: Tensor, places: Tensor, rows: Tensor) -> None:
    """target[places] += rows"""
    if is_accelerator(target.device):
        add_on_device(target, places, rows)
    else:
        target.index_add_(0, places, rows)


def collect_rows(target: Tensor, places: Tensor, rows: Tensor, is_first: Tensor, is_unsound: Tensor) -> None:
    """The same on a device, into memory that is anything yet; is_unsound: whether anything there is not finite."""
    add_on_device(target, places, rows, is_first, is_unsound)


def copy_rows(source: Tensor, from_places: Tensor | None, target: Tensor, to_places: Tensor | None) -> None:
    """target[to_places] = source[from_places], of two arrays that do not overlap; None: all of them, in order. One of
    the two may be in host memory that the other's device can reach."""
    if is_accelerator(source.device) or is_accelerator(target.device):
        copy_on_device(source, from_places, target, to_places)
    elif to_places is None:
        if from_places is None:
            target.copy_(source)
        else:
            torch.index_select(source, 0, from_places, out=target)
    elif from_places is None:
        target.index_copy_(0, to_places, source)
    elif source.is_contiguous() and target.is_contiguous():
        copy_records(source, from_places, target, to_places)
    else:
        target.index_copy_(0, to_places, take_rows(source, from_places))
