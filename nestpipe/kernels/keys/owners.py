"""Owners of keys in device memory, as the native library finds them in host memory."""

import torch
from torch import Tensor

_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_BUCKET_BITS = 16


def owners_of(keys: Tensor, salts: Tensor, world_size: int) -> Tensor:
    """Returns the rank that owns each key, int32. salts: of each key's table."""
    buckets = _shifted(_mix64(keys ^ salts), 64 - _BUCKET_BITS)
    return ((buckets * world_size) >> _BUCKET_BITS).to(torch.int32)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shifted(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts to the right and fills up with zeros; torch fills up with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
