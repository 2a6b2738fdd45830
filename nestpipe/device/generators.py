"""The default generators of random numbers: the host's, and those of an accelerator."""

from contextlib import AbstractContextManager

import torch

from nestpipe.device.streams import is_accelerator


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """A context after which the default generators of the host and of the device are as before."""
    devices = [device] if is_accelerator(device) else []
    return torch.random.fork_rng(devices, device_type=device.type)
