"""Bits that say which parts of a batch use a key: [keys, bytes], bit p % 8 of byte p // 8 for part p."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bits = NDArray[np.uint8]


def with_early_part(uses: Tensor, num_parts: int, is_early: Tensor) -> Tensor:
    """Puts a part before the others. It takes the place of the first part that uses a key which is early."""
    bits, early = uses.numpy(), is_early.numpy()
    later = _without_first(bits, early)
    shifted = np.zeros((len(bits), _num_bytes(num_parts + 1)), dtype=np.uint8)
    shifted[:, : bits.shape[1]] = later << 1
    carried = shifted.shape[1] - 1
    shifted[:, 1:] |= later[:, :carried] >> 7
    shifted[:, 0] |= early
    return torch.from_numpy(shifted)


def with_late_part(uses: Tensor, num_parts: int, is_late: Tensor) -> Tensor:
    """Puts a part behind the others. It takes the place of the last part that uses a key which is late."""
    bits, late = uses.numpy(), is_late.numpy()
    longer = np.zeros((len(bits), _num_bytes(num_parts + 1)), dtype=np.uint8)
    longer[:, : bits.shape[1]] = _without_last(bits, late)
    longer[:, num_parts // 8] |= late.astype(np.uint8) << (num_parts % 8)
    return torch.from_numpy(longer)


def _num_bytes(num_parts: int) -> int:
    return (num_parts + 7) // 8


def _without_first(bits: Bits, is_marked: NDArray[np.bool_]) -> Bits:
    """Clears the first bit of marked keys."""
    cleared, rows = bits.copy(), np.arange(len(bits))
    places = (bits != 0).argmax(axis=1)
    first = bits[rows, places]
    cleared[rows, places] = np.where(is_marked, first & (first - 1), first)
    return cleared


def _without_last(bits: Bits, is_marked: NDArray[np.bool_]) -> Bits:
    """Clears the last bit of marked keys."""
    cleared, rows = bits.copy(), np.arange(len(bits))
    places = bits.shape[1] - 1 - (bits[:, ::-1] != 0).argmax(axis=1)
    last = bits[rows, places]
    cleared[rows, places] = np.where(is_marked, _last_cleared()[last], last)
    return cleared


@cache
def _last_cleared() -> Bits:
    """Returns every byte without its highest bit."""
    return np.array([byte - (1 << byte.bit_length() >> 1) for byte in range(256)], dtype=np.uint8)
