"""Short lists from host memory to a device, on a stream that must not be late.

A copy has to wait for its turn at the device's engine, and rows of a later batch keep that busy for milliseconds at a
time. So on CUDA a kernel reads the list over the link itself.
"""

import torch
from torch import Tensor

from nestpipe.kernels.dispatch import HAS_TRITON
from nestpipe.kernels.rows.keep_alive import keep_alive_until


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Of int32 or int64, without waiting for the device."""
    if device.type == "cpu":
        return numbers
    if device.type != "cuda" or not HAS_TRITON or numbers.numel() == 0:
        return numbers.pin_memory().to(device, non_blocking=True)
    from nestpipe.kernels.rows import triton_upload

    here, there = numbers.contiguous().pin_memory(), torch.empty(numbers.shape, dtype=numbers.dtype, device=device)
    triton_upload.fetch(here, there)
    keep_alive_until(here, device)
    return there
