"""Host memory that kernels work on, kept until they have: torch knows of copies only, and would use it again before."""

import threading
from collections import deque

import torch
from torch import Tensor

_lent: deque[tuple[torch.Event, Tensor]] = deque()
_lock = threading.Lock()


def lend(memory: Tensor, device: torch.device) -> None:
    """Until all that this thread's stream has been given so far is done."""
    moment = torch.accelerator.current_stream(device).record_event()
    with _lock:
        while _lent and _lent[0][0].query():
            _lent.popleft()
        _lent.append((moment, memory))


def num_lent() -> int:
    return len(_lent)
