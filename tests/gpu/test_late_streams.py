"""Tests I11 and the marks: streams with random delays change nothing.

The kernels of a small test end before another thread reacts, so here every operation of a lane first makes its stream
sleep. Fails if Executor._run does not wait for the marks of its dependencies, if Executor.drain drops marks, if
Executor.wait skips a mark because its thread is done, or if _Outgoing copies records without waiting for the stream
of the host lane (`begun`). Memory that is reused too early is not provoked.
"""

import random
from dataclasses import replace

import pytest
import torch

from nestpipe import World
from nestpipe.distributed import Channel
from nestpipe.embedding.host_link import _Incoming, _Outgoing
from nestpipe.pipelining import pipeline
from nestpipe.pipelining.executor import Action, Executor
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of
from tests.exactness.test_r06_capacity import digest_of

POOL_STREAMS = ("thrash", "returning", "period_3", "random")
CASE = Case("adam", "shared", 4, steps=9)
MOST_CYCLES = 4_000_000
"""About 2 ms."""


def sleep(draws: random.Random) -> None:
    torch.cuda._sleep(draws.randrange(MOST_CYCLES))


class LateExecutor(Executor):
    def __init__(self, operations, actions, *others) -> None:
        draws = random.Random(1)

        def late(action: Action) -> Action:
            def act(op) -> None:
                sleep(draws)
                action(op)

            return act

        super().__init__(operations, {stage: late(action) for stage, action in actions.items()}, *others)


def digests(world: World, schedule: str, flushes: bool) -> list[str]:
    """Returns the digest of serial, then that of the schedule with late streams."""
    results = []
    for is_late in (False, True):
        trainer = make_trainer(world, replace(CASE, schedule=schedule if is_late else "serial"))
        trainer.check_split = False
        with pytest.MonkeyPatch.context() as patch:
            if is_late:
                patch.setattr(pipeline, "Executor", LateExecutor)
                original = Channel.all_reduce_sum

                draws = random.Random(2)

                def slow_sum(self: Channel, values, original=original, draws=draws) -> None:
                    sleep(draws)
                    original(self, values)

                patch.setattr(Channel, "all_reduce_sum", slow_sum)
            after = (lambda _, trainer=trainer: trainer.flush()) if flushes else None
            trainer.fit(share_of(global_batches(CASE.steps), world), after_step=after)
        results.append(trainer.digest())
    return results


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("schedule", ["inter", "intra", "nested"])
@pytest.mark.parametrize("size", [1, 2])
def test_late_streams(device: str, size: int, schedule: str, flushes: bool) -> None:
    if device != "cuda":
        pytest.skip("needs CUDA, whose streams can sleep; runs on a machine with CUDA")
    for serial, late in on_ranks(size, digests, schedule, flushes, device=device):
        assert late == serial


def pool_digests(world: World, schedule: str) -> list[tuple[str, str]]:
    """Returns the digests of serial and of the schedule with late streams, with as few slots as possible."""
    copy_out, copy_in, draws = _Outgoing.copy, _Incoming.copy, random.Random(3)

    def late_out(self: _Outgoing, *arguments):
        sleep(draws)
        with self._streams.on_lane("out"):
            sleep(draws)
        return copy_out(self, *arguments)

    def late_in(self: _Incoming, *arguments):
        sleep(draws)
        return copy_in(self, *arguments)

    results = []
    for stream in POOL_STREAMS:
        expected = digest_of(world, stream, replace(CASE, schedule="serial"), None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "Executor", LateExecutor)
            patch.setattr(_Outgoing, "copy", late_out)
            patch.setattr(_Incoming, "copy", late_in)
            results.append((expected, digest_of(world, stream, replace(CASE, schedule=schedule), "minimum")))
    return results


@pytest.mark.parametrize(("size", "schedule"), [(1, "inter"), (2, "nested"), (2, "inter")])
def test_late_streams_of_the_pool(device: str, size: int, schedule: str) -> None:
    """Every hand-over of a slot: update to eviction, eviction to retrieve, retrieve to send."""
    if device != "cuda":
        pytest.skip("needs CUDA, whose streams can sleep; runs on a machine with CUDA")
    for results in on_ranks(size, pool_digests, schedule, device=device):
        assert [late == serial for serial, late in results] == [True] * len(POOL_STREAMS)
