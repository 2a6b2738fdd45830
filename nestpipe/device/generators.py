"""The default random number generators of the host and of an accelerator."""

import zlib
from contextlib import AbstractContextManager

import torch

from nestpipe.device.streams import is_accelerator


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context that restores the default generators of the host and of the device when it ends."""
    devices = [device] if is_accelerator(device) else []
    return torch.random.fork_rng(devices, device_type=device.type)


def seed_generators(device: torch.device, *purpose: int) -> None:
    """Seeds the default generators, from which dropout draws, by (seed, step, rank, micro-batch).

    torch.manual_seed does the same, but keeps every call with its traceback for each kind of device that is missing.
    """
    seed = zlib.crc32(repr(purpose).encode())
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        module = torch.get_device_module(device)
        if hasattr(module, "default_generators"):
            module.default_generators[device.index].manual_seed(seed)
        else:
            module.manual_seed(seed)
