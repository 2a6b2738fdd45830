"""A rank that trains when it is told to: all systems start at once, and take turns. Needs only torch and numpy."""

import ctypes
import gc
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from nestpipe.bench.peer.workload import QUICK, WORKLOADS, Workload
from nestpipe.store.process_memory import peak_bytes, reset_peak


@dataclass(frozen=True)
class Task:
    """What a rank is started for: the first line that it reads."""

    workload: str
    optimizer: str
    way: str
    """"serial", "nested" or "dense" of ours; "plain" or "pipelined" of TorchRec."""
    num_micro_batches: int
    is_quick: bool

    @property
    def work(self) -> Workload:
        return (QUICK if self.is_quick else WORKLOADS)[self.workload]


class Loop(Protocol):
    """Trains step by step, repeating its batches."""

    def step(self) -> None: ...

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Returns the dense weights and some rows. All ranks call it."""


def read_task() -> Task:
    torch.set_num_threads(1)
    return Task(**json.loads(sys.stdin.readline()))


def take_turns(loop: Loop) -> None:
    """Says that the loop is ready, and answers each request with one line, until the requests end."""
    _free_unused_memory()  # tables were filled, which takes memory of its own
    reset_peak()
    _answer({})
    for line in sys.stdin:
        request = json.loads(line)
        if "steps" in request:
            _answer(_train(loop, request["steps"]))
        else:
            weights = loop.weights()
            if dist.get_rank() == 0:
                np.savez(request["weights"], allow_pickle=False, **weights)
            _answer({})


def _train(loop: Loop, num_steps: int) -> dict[str, float]:
    dist.barrier()
    sent, started, worked = _sent_bytes(), time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        loop.step()
    worked = time.process_time() - worked
    dist.barrier()
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "cpu_seconds": worked,
        "sent_bytes": _sent_bytes() - sent,
        "peak_bytes": peak_bytes(),
    }


def _free_unused_memory() -> None:
    """Has the C library return freed memory to the system. How much it keeps depends on the sizes of freed blocks."""
    gc.collect()
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _sent_bytes() -> int:
    """Returns the bytes that the interface has sent, with those of all processes on this host."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    return 0


def _answer(values: dict[str, float]) -> None:
    print(json.dumps(values), flush=True)
