"""NCCL among several ranks that share one device: it takes them for hosts of their own, and talks by loopback sockets.

Fails if operations of lanes that exchange rows get threads of their own instead of the issuer (Executor._lane), or if
early rows do not wait for the late update of two batches before.
"""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from nestpipe import World
from nestpipe.distributed import RankError
from nestpipe.embedding.plan import WINDOWS
from nestpipe.pipelining import NonFiniteError
from nestpipe.pipelining.schedule import SCHEDULES
from tests.exactness.cases import Case, make_trainer
from tests.exactness.test_e1_bit_identical import stream_batches
from tests.ranks import run_fragile_ranks, run_ranks

STREAMS = ("period_2", "disjoint", "full_overlap", "random", "one_rank_empty")
BY_NCCL = {"backend": "nccl", "nccl_may_share_device": True}


@pytest.fixture(autouse=True)
def _needs_nccl(device: str) -> None:
    if device != "cuda" or not dist.is_nccl_available():
        pytest.skip("needs CUDA and NCCL; runs on a machine with both")


def trained(world: World, stream: str, case: Case, cross_batch: bool) -> str:
    trainer = make_trainer(world, case, cross_batch=cross_batch)
    trainer.check_split = False
    trainer.fit(stream_batches(stream, world))
    return trainer.digest()


def digests(world: World, num_micro_batches: int) -> tuple[str, dict[str, set[str]]]:
    """Returns the backend, and the digests of each stream."""
    by_stream = {}
    for number, stream in enumerate(STREAMS):
        case = Case("adam", "shared", num_micro_batches, WINDOWS[number % 2])
        runs = [(replace(case, schedule=schedule), False) for schedule in SCHEDULES]
        runs += [(replace(case, schedule="nested", window=window), True) for window in WINDOWS]
        by_stream[stream] = {trained(world, stream, *run) for run in runs}
    return world.backend, by_stream


@pytest.mark.parametrize(("size", "num_micro_batches"), [(2, 1), (2, 5), (4, 2)])
def test_same_bits_with_and_without_cross_batch(device: str, size: int, num_micro_batches: int) -> None:
    for backend, by_stream in run_ranks(size, digests, num_micro_batches, device=device, **BY_NCCL):
        assert backend == "nccl"
        assert {stream: len(different) for stream, different in by_stream.items()} == dict.fromkeys(STREAMS, 1)


def resumed(world: World, kind: str) -> bool:
    """Trains with an error on the last rank at batch 3, then goes on. Returns whether the result is serial's."""
    batches = stream_batches("random", world)
    bad = list(batches)
    if world.rank == world.size - 1:
        bad[3] = replace(bad[3], inputs={"label": bad[3].inputs["label"] * float("nan")})
    case = Case("adam", "shared", 2)
    results = []
    for schedule in ("serial", "nested"):
        trainer = make_trainer(world, replace(case, schedule=schedule))
        trainer.check_split = False
        if kind == "non-finite":
            with pytest.raises(NonFiniteError):
                trainer.fit(bad)
        else:
            with pytest.raises((LookupError, RankError)):
                trainer.fit(_failing(batches, 3, world.rank == world.size - 1))
            trainer.fit(batches[4:])
        results.append((trainer.store.size("item"), trainer.num_steps))
    return results[0] == results[1]


def _failing(batches: list, at: int, fails: bool):
    for number, batch in enumerate(batches):
        if number == at and fails:
            raise LookupError("no such file")
        yield batch


def lost(world: World, kind: str) -> tuple[str, float]:
    """Trains until the last rank is killed, or hangs before it joins a collective of device memory. Returns the error
    of the others, and how long their device then took to finish."""
    batches = stream_batches("random", world)
    world.watch.timeout_seconds = world.watch.stall_seconds = 6.0
    if world.rank == world.size - 1:

        def fail(*arguments: object) -> None:
            if kind != "hangs":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)

        world.rows._issue = fail
    trainer = make_trainer(world, Case("adam", "shared", 2, schedule="nested"))
    trainer.check_split = False
    if kind == "killed while others wait for the device":
        trainer.model.register_forward_hook(lambda module, inputs, loss: print(loss.item()))
    with pytest.raises(RankError) as caught:
        trainer.fit(batches)
    started = time.monotonic()
    torch.cuda.synchronize()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("kind", ["killed", "killed while others wait for the device", "hangs"])
def test_a_lost_rank_does_not_hold_the_device(device: str, kind: str) -> None:
    """The others end their collectives, so that their device is free again. Fails if Link._abort does nothing; the
    second kind never ends if the monitor does not call it."""
    results = run_fragile_ranks(3, lost, kind, num_results=2, device=device, **BY_NCCL)
    # Ranks that wait inside one collective look alike: whichever is found first to make no progress is named.
    reason = "no progress for 6 s" if kind == "hangs" else "rank 2 failed"
    for text, seconds in results.values():
        assert reason in text
        assert seconds < 5


@pytest.mark.parametrize("kind", ["reader", "non-finite"])
def test_an_error_on_one_rank(device: str, kind: str) -> None:
    assert all(run_ranks(2, resumed, kind, device=device, **BY_NCCL))
