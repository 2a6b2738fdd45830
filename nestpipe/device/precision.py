"""The precision in which a dense model computes on a device."""

from contextlib import AbstractContextManager

import torch


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Returns a context in which torch computes in this dtype where it deems that safe."""
    return torch.autocast(device.type, dtype=dtype)
