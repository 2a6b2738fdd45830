"""A rank that raises in the middle of a step, is killed, interrupted, or hangs: every other rank says so, in time.

Fails, for example, if Pipeline.__exit__ does not report an error, or if Watch.wait does not look at the clock.
"""

import os
import signal
import time
from dataclasses import replace

import pytest

from nestpipe import World
from nestpipe.distributed import RankError
from tests.exactness.cases import Case, global_batches, make_trainer, share_of
from tests.ranks import run_fragile_ranks
from tests.schedules import NESTED

CASE = Case("adagrad", "pooled_sum", 2, steps=6)
BAD_STEP = 3
TIMEOUT_SECONDS = 3.0


def misbehave(kind: str) -> None:
    if kind == "raises":
        raise KeyError("no such layer")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def lose_a_rank(world: World, kind: str, bad_rank: int, schedule: str) -> tuple[str, str, float, str]:
    """What was raised, its text, how long after the last good step, and what a second fit then says."""
    world.watch.timeout_seconds = TIMEOUT_SECONDS
    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    forward, started = trainer.model.forward, time.perf_counter()

    def spoiled(embeddings, inputs):
        if trainer.num_steps == BAD_STEP and world.rank == bad_rank:
            misbehave(kind)
        return forward(embeddings, inputs)

    trainer.model.forward = spoiled
    trainer.check_split = False
    batches = share_of(global_batches(CASE.steps), world)
    trainer.fit(batches[:BAD_STEP])
    started = time.perf_counter()
    try:
        trainer.fit(batches[BAD_STEP:])
        raised: BaseException = AssertionError("nothing was raised")
    except BaseException as error:
        raised = error
    seconds = time.perf_counter() - started
    try:
        trainer.fit(batches[BAD_STEP:])
        again = "nothing"
    except RankError as error:
        again = str(error)
    return type(raised).__name__, str(raised), seconds, again


@pytest.mark.parametrize("schedule", NESTED)
@pytest.mark.parametrize(("size", "bad_rank"), [*(pytest.param(2, r, marks=pytest.mark.slow) for r in (1, 0)), (3, 1)])
@pytest.mark.parametrize(
    ("kind", "own_error", "text", "most_seconds"),
    [
        ("raises", "KeyError", "KeyError: 'no such layer'", 3),
        ("interrupted", "KeyboardInterrupt", "it was interrupted (Ctrl-C)", 3),
        ("killed", None, "its connection was closed, it has died", 5),
        ("hangs", None, "no answer for 3 s, it hangs", TIMEOUT_SECONDS + 5),
    ],
)
def test_every_rank_says_so(
    schedule: str, size: int, bad_rank: int, kind: str, own_error: str | None, text: str, most_seconds: float
) -> None:
    num_results = size if own_error else size - 1
    results = run_fragile_ranks(size, lose_a_rank, kind, bad_rank, schedule, num_results=num_results)
    assert len(results) == num_results
    for rank, (name, message, seconds, again) in results.items():
        assert seconds < most_seconds
        assert "start them again" in again
        if rank == bad_rank:
            assert name == own_error
        else:
            assert name == "RankError", message
            assert f"rank {bad_rank} failed: {text}" in message
            assert message.startswith(f"step {BAD_STEP}, in ")


def wait_for_a_busy_rank(world: World) -> int:
    world.watch.timeout_seconds = 1.0
    if world.rank == 1:
        with world.busy():
            time.sleep(4)
    return len(world.control.share_text("here"))


def test_heartbeats_are_waited_for() -> None:
    """Fails if Watch.wait compares the beats with themselves."""
    assert run_fragile_ranks(2, wait_for_a_busy_rank, num_results=2) == {0: 2, 1: 2}
