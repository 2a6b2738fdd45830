"""Runs a measurement on several ranks of this machine. The records of rank 0 come back one by one."""

import os
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import spawn

from nestpipe.bench.harness.report import Record
from nestpipe.device.streams import device_of_rank
from nestpipe.distributed import World
from nestpipe.distributed.backend import take_ranks_for_hosts

Work = Callable[..., Iterator[Record]]
"""(world, *arguments) -> records. Every rank calls it in its own process, so it must be a module's function."""

POLL_SECONDS = 0.5


def records_of_ranks(
    num_ranks: int,
    work: Work,
    *arguments: Any,
    device: str = "cpu",
    timeout_seconds: float = 25.0,
    backend: str = "gloo",
) -> Iterator[Record]:
    """Yields the records of rank 0. Raises the error of a rank that fails. Ranks share devices if there are too few,
    with NCCL, too, which then takes each for a host of its own."""
    results: Queue[Record | None] = get_context("spawn").Queue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = device, timeout_seconds, backend
    ranks = spawn(_run, (num_ranks, store.port, results, work, arguments, *settings), num_ranks, join=False)
    while True:
        try:
            record = results.get(timeout=POLL_SECONDS)
        except Empty:
            ranks.join(timeout=0)
            continue
        if record is None:
            break
        yield record
    while not ranks.join():
        pass


def _run(
    rank: int,
    num_ranks: int,
    port: int,
    results: "Queue[Record | None]",
    work: Work,
    arguments: tuple[Any, ...],
    device: str,
    timeout_seconds: float,
    backend: str,
) -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent process holds the store
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    if backend == "nccl":
        take_ranks_for_hosts(rank)
    world = World(rank, num_ranks, timeout_seconds, device_of_rank(device, rank), backend)
    for record in work(world, *arguments):
        if rank == 0:
            results.put(record)
    if rank == 0:
        results.put(None)
    world.close()
