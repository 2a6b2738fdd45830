"""Tests collectives on device memory, by NCCL and from one thread.

NCCL accepts one rank per device. On a machine with one device, a channel is told that it has a second rank and talks to
itself; with a device for each rank, whole runs are tested. Fails if Channel._issue does not wait for the mark of the
calling thread.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from nestpipe import World
from nestpipe.device.streams import Streams, wait_for
from nestpipe.distributed import Channel, Lane
from nestpipe.distributed.watch import Watch
from nestpipe.pipelining.schedule import SCHEDULES
from tests.distributed.test_issuer import train_streams
from tests.exactness.cases import Case, train
from tests.ranks import run_ranks

LATE_CYCLES = 20_000_000
"""About 10 ms."""


def talk_to_itself(world: World) -> None:
    """Runs in its own process, since it makes a process group."""
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    device = world.device
    watch = Watch(0, 1, None, 25.0)
    channel = Channel("rows", watch, None, Streams(device), Lane("issuer"), dist.group.WORLD)
    channel.size = 2  # otherwise nothing is sent
    for number in range(5):
        torch.cuda._sleep(LATE_CYCLES)
        sent = torch.full((1 << 20,), number, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        channel.all_to_all(sent, [1 << 20], received, [1 << 20])
        assert received.unique().tolist() == [number]
        torch.cuda._sleep(LATE_CYCLES)
        value = torch.full((1000,), float(number), device=device)
        channel.all_reduce_sum(value)
        assert (value + 1).unique().tolist() == [number + 1]
        torch.cuda._sleep(LATE_CYCLES)
        parts = [torch.full((2, 3), float(number), device=device), torch.ones(4, device=device)]
        flat, moment = watch.wait(channel.begin_sum(parts), "sum")
        wait_for(moment)
        assert flat.tolist() == [float(number)] * 6 + [1.0] * 4
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    channel.all_to_all(nothing, [0], nothing.clone(), [0])
    dist.destroy_process_group()


def test_one_rank_by_nccl(device: str) -> None:
    if device != "cuda" or not dist.is_nccl_available():
        pytest.skip("needs CUDA and NCCL; runs on a machine with both")
    run_ranks(1, talk_to_itself, device=device)


def test_one_issuer_on_a_shared_device(device: str) -> None:
    """Gloo sends through host memory, but from one thread, and each lane keeps its stream."""
    first, *others = run_ranks(2, train_streams, [*SCHEDULES], device=device)
    assert all(other == first for other in others)
    assert [len(set(digests)) for digests in first] == [1] * len(first)


def digests_by_nccl(world: World, case: Case) -> tuple[str, list[str]]:
    runs = [replace(case, schedule=s, window=w) for s in SCHEDULES for w in ("once", "resend")]
    return world.backend, [train(world, run)[0] for run in runs]


@pytest.mark.parametrize("size", [2, 4])
def test_a_device_for_each_rank(device: str, size: int) -> None:
    if device != "cuda" or torch.accelerator.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices; runs on a machine with them")
    results = run_ranks(size, digests_by_nccl, Case("adam", "shared", 4, steps=6), device=device)
    assert {backend for backend, _ in results} == {"nccl"}
    assert len({digest for _, digests in results for digest in digests}) == 1


def test_two_ranks_on_one_device_are_refused(device: str) -> None:
    if device != "cuda" or torch.accelerator.device_count() > 1:
        pytest.skip("needs exactly one CUDA device; runs on a machine with one")
    texts = run_ranks(2, refusal, device)
    assert all("ranks 0, 1 are not alone on theirs" in text for text in texts)


def refusal(world: World, device: str) -> str:
    with pytest.raises(ValueError, match="needs a device for each rank") as error:
        World.from_environment(device=device, backend="nccl")
    return str(error.value)
