"""Pinned host memory that kernels read and write directly.

torch keeps pinned memory from being reused only while a copy of its own is under way. Memory that a kernel works on is
therefore kept alive here until the kernel's stream is done with it.
"""

import threading
from collections import deque

import torch
from torch import Tensor

from nestpipe.device.streams import Streams, mark, use_here, wait_for
from nestpipe.kernels.dispatch import HAS_TRITON

_streams: dict[torch.device, Streams] = {}
_kept: deque[tuple[torch.Event, Tensor]] = deque()
_lock = threading.Lock()


def keep_alive_until(memory: Tensor, device: torch.device) -> None:
    """Keeps memory alive until this thread's stream has done everything it was given so far."""
    moment = torch.accelerator.current_stream(device).record_event()
    with _lock:
        while _kept and _kept[0][0].query():
            _kept.popleft()
        _kept.append((moment, memory))


def num_kept_alive() -> int:
    return len(_kept)


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Returns a short list of int32 or int64 on the device, without waiting for it.

    A copy has to wait for its turn at the device's copy engine, which rows of a later batch keep busy for milliseconds
    at a time. So on CUDA a kernel reads the list over the link itself. On a link that is busy that takes 20 to 40
    microseconds, so it has a stream of its own: the list is there when this thread's stream gets to it.
    """
    if device.type == "cpu":
        return numbers
    if device.type != "cuda" or not HAS_TRITON or numbers.numel() == 0:
        return numbers.pin_memory().to(device, non_blocking=True)
    from nestpipe.kernels.rows import triton_copy

    source = numbers.contiguous().pin_memory()
    with _lock:
        if device not in _streams:
            _streams[device] = Streams(device)
    with _streams[device].on_lane("upload"):
        target = torch.empty(numbers.shape, dtype=numbers.dtype, device=device)
        triton_copy.fetch(source, target)
        keep_alive_until(source, device)
        fetched = mark(device)
    wait_for(fetched)
    use_here(target)
    return target
