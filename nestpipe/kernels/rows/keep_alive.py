"""Host memory that kernels work on, kept until they have: torch knows of copies only, and would use it again before."""

import threading
from collections import deque

import torch
from torch import Tensor

_kept: deque[tuple[torch.Event, Tensor]] = deque()
_lock = threading.Lock()


def keep_alive_until(memory: Tensor, device: torch.device) -> None:
    """Until all that this thread's stream has been given so far is done."""
    moment = torch.accelerator.current_stream(device).record_event()
    with _lock:
        while _kept and _kept[0][0].query():
            _kept.popleft()
        _kept.append((moment, memory))


def num_kept_alive() -> int:
    return len(_kept)
