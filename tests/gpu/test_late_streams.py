"""Tests I11 and the marks: streams with random delays change nothing.

The kernels of a small test end before another thread reacts, so here every operation of a lane first makes its stream
sleep. Fails if Executor._run does not wait for the marks of its dependencies, if Executor.drain drops marks, or if
Executor.wait skips a mark because its thread is done. Memory that is reused too early is not provoked.
"""

import random
from dataclasses import replace

import pytest
import torch

from nestpipe import World
from nestpipe.distributed import Channel
from nestpipe.pipelining import pipeline
from nestpipe.pipelining.executor import Action, Executor
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of

CASE = Case("adagrad", "shared", 4, steps=9)
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
