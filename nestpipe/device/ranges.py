"""Named ranges for a profiler of the device, such as Nsight Systems."""

from typing import Protocol, cast

import torch


class Ranges(Protocol):
    """Ranges of the calling thread. They nest. torch.cuda.nvtx is one."""

    def range_push(self, msg: str) -> object:
        """Begins a range."""

    def range_pop(self) -> object:
        """Ends the range of this thread that began last."""


def ranges_on(device: torch.device | None, is_wanted: bool) -> Ranges | None:
    """Returns NVTX if ranges are wanted and the device is CUDA's; no profiler would show them elsewhere."""
    return cast(Ranges, torch.cuda.nvtx) if is_wanted and device is not None and device.type == "cuda" else None
