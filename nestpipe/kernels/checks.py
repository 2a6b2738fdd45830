"""Checks of arguments that do not wait for the device: shapes, strides, dtypes, kinds of memory."""

from collections.abc import Mapping

import torch
from torch import Tensor

from nestpipe.store.interface import DTYPES


def check_rows(arrays: Mapping[str, Tensor]) -> None:
    """Checks that arrays have one dtype and two dimensions, with the elements of a row contiguous."""
    dtypes = {array.dtype for array in arrays.values()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise ValueError(f"{', '.join(arrays)} must all be float32, or all float64, not {sorted(map(str, dtypes))}")
    for name, array in arrays.items():
        if array.dim() != 2 or (array.shape[1] > 1 and array.stride(1) != 1):
            raise ValueError(
                f"{name} has shape {list(array.shape)} and strides {list(array.stride())}; it must have 2 dimensions "
                "and the elements of a row side by side: take its contiguous()"
            )


def check_written(name: str, array: Tensor) -> None:
    """Checks that rows to be written do not share memory."""
    if len(array) > 1 and array.stride(0) < array.shape[1]:
        raise ValueError(f"{name} has rows that overlap: it is an expanded view; take its contiguous()")


def check_shape(name: str, array: Tensor, num_rows: int, width: int) -> None:
    if array.shape != (num_rows, width):
        raise ValueError(f"{name} has shape {list(array.shape)}, must have [{num_rows}, {width}]")


def check_numbers(name: str, numbers: Tensor | None, size: int) -> None:
    """Checks a list of row places or other whole numbers. None is always valid."""
    if numbers is None:
        return
    if numbers.dtype != torch.int64 or numbers.shape != (size,) or not numbers.is_contiguous():
        raise ValueError(
            f"{name} is {numbers.dtype} of shape {list(numbers.shape)}, must be contiguous int64 of shape [{size}]"
        )


def check_slots(slots: Tensor | None, rows: Tensor, gradient: Tensor) -> None:
    """Checks that there is one gradient for each slot of `rows`, or without slots for each row."""
    check_shape("gradient", gradient, len(rows) if slots is None else len(gradient), rows.shape[1])
    check_numbers("slots", slots, len(gradient))
    if len(gradient) > len(rows):
        raise ValueError(f"slots are distinct, so {len(gradient)} of them cannot lie in {len(rows)} rows")


def check_reachable(arrays: Mapping[str, Tensor | None]) -> None:
    """Checks that host memory is pinned if it is used together with device memory, so that the device can read it."""
    given = {name: array for name, array in arrays.items() if array is not None}
    if not any(array.is_cuda for array in given.values()):
        return
    for name, array in given.items():
        if array.device.type == "cpu" and array.numel() > 0 and not array.is_pinned():
            raise ValueError(f"{name} is in host memory that the device cannot reach: take its pin_memory()")
