"""A rank that raises in the middle of a step, is killed, interrupted, stopped, or hangs: every other rank reports it in
time.

Each report names the rank's host, step and stage, and since when it is lost.

Fails, for example, if Pipeline.__exit__ does not report an error, if Monitor._check_silence or _check_stall does not
publish, or if Activity.doing does not note where an error was raised.
"""

import os
import re
import signal
import socket
import time
from dataclasses import replace
from threading import Timer

import pytest

from nestpipe import World
from nestpipe.distributed import RankError
from nestpipe.pipelining.schedule import Op
from nestpipe.pipelining.stages import Stages
from tests.exactness.cases import Case, global_batches, make_trainer, share_of
from tests.ranks import run_fragile_ranks
from tests.schedules import NESTED

CASE = Case("adagrad", "pooled_sum", 2, steps=6)
BAD_STEP = 3
TIMEOUT_SECONDS = 3.0
STALL_SECONDS = 2.0


def misbehave(kind: str) -> None:
    if kind == "raises":
        raise KeyError("no such layer")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def lose_a_rank(world: World, kind: str, bad_rank: int, schedule: str) -> tuple[str, str, float, str, float]:
    """Returns the error's type, its text, the time after the last good step, the error of a second fit, and the time of
    day at the last good step."""
    world.watch.timeout_seconds = TIMEOUT_SECONDS
    world.watch.stall_seconds = STALL_SECONDS
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
    while world.watch._monitor.holder_beat is None:  # the report says when rank 0 was last seen
        time.sleep(0.01)
    started, time_of_day = time.perf_counter(), time.time()
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
    return type(raised).__name__, str(raised), seconds, again, time_of_day


HERE, LAST = "step 3, in forward and backward", r"[\w ]+, in [\w ']+"
CASES = {
    "raises": ("KeyError", "KeyError: 'no such layer'", f"{HERE}, at", 3.0),
    "interrupted": ("KeyboardInterrupt", r"it was interrupted \(Ctrl-C\)", f"{HERE}, at", 3.0),
    "killed": (None, "its connection was closed, it has died", f"{LAST}, last seen", 6.0),
    "hangs": (None, "no progress for . s, it hangs", f"{HERE}, since", STALL_SECONDS + 5),
    "stopped": (
        None,
        "no sign of life for . s: it is stopped, or cut off from the network",
        f"{LAST}, last seen",
        TIMEOUT_SECONDS + 3,
    ),
}
"""By kind: the bad rank's own error, the text on other ranks, the place of the bad rank, and the longest time in
seconds."""
HOLDER_STOPPED = (
    "it holds the ranks' store, which has not answered for . s: that process is stopped, or cut off from this rank"
)


@pytest.mark.parametrize("schedule", NESTED)
@pytest.mark.parametrize(
    ("kind", "size", "bad_rank"),
    [
        *((kind, 3, 1) for kind in CASES),
        ("stopped", 3, 0),
        *(pytest.param(kind, 2, r, marks=pytest.mark.slow) for r in (1, 0) for kind in CASES),
    ],
)
def test_every_rank_reports_it(schedule: str, kind: str, size: int, bad_rank: int) -> None:
    """Rank 0 holds the store: in version 0.1 the others waited for ever when it was stopped."""
    own_error, text, place, most_seconds = CASES[kind]
    if kind == "stopped" and bad_rank == 0:
        text = HOLDER_STOPPED
    num_results = size if own_error else size - 1
    results = run_fragile_ranks(size, lose_a_rank, kind, bad_rank, schedule, num_results=num_results)
    assert len(results) == num_results
    where, word = place.rsplit(", ", 1)
    details = rf"\({where}, on host {re.escape(socket.gethostname())}, {word} (\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d)\)"
    for rank, (name, message, seconds, again, time_of_day) in results.items():
        assert seconds < most_seconds
        assert "start them again" in again
        if rank == bad_rank:
            assert name == own_error
        else:
            assert name == "RankError", message
            found = re.search(f"rank {bad_rank} failed: {text} {details}", message)
            assert found, message
            since = time.mktime(time.strptime(found.group(1), "%Y-%m-%d %H:%M:%S"))
            assert -2 < since - time_of_day < 3
            assert message.startswith(f"step {BAD_STEP}, in ")


def interrupt_while_the_holder_is_stopped(world: World) -> tuple[str, float]:
    """Stops rank 0, which holds the store. Rank 1 gets a Ctrl-C long before its timeout."""
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.perf_counter()
    try:
        with world.watch.reporting():
            world.control.share_text("here")
        name = "nothing"
    except BaseException as error:
        name = type(error).__name__
    return name, time.perf_counter() - started


def test_interrupted_while_the_store_is_dead() -> None:
    """Fails if Watch.report waits for the store without a limit."""
    ((name, seconds),) = run_fragile_ranks(2, interrupt_while_the_holder_is_stopped, num_results=1).values()
    assert name == "KeyboardInterrupt"
    assert seconds < 8


def interrupt_the_final_drain(world: World) -> tuple[str, str, float]:
    """Sends a Ctrl-C to rank 1 while only a long write-back is left to do."""
    trainer = make_trainer(world, replace(CASE, schedule="inter"))
    write_back = Stages.write_back

    def slow(stages: Stages, op: Op) -> None:
        if op.batch == CASE.steps - 1 and world.rank == 1:
            Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(20)
        write_back(stages, op)

    Stages.write_back = slow
    started = time.perf_counter()
    try:
        trainer.fit(share_of(global_batches(CASE.steps), world), CASE.steps)
        world.control.share_text("here")
        raised: BaseException = AssertionError("nothing was raised")
    except BaseException as error:
        raised = error
    return type(raised).__name__, str(raised), time.perf_counter() - started


def test_interrupted_in_the_final_drain() -> None:
    """Fails if Pipeline._end settles after a Ctrl-C: it joins a lane that may wait for other ranks."""
    results = run_fragile_ranks(2, interrupt_the_final_drain, num_results=2)
    assert results[1][0] == "KeyboardInterrupt"
    assert "rank 1 failed: it was interrupted (Ctrl-C)" in results[0][1]
    assert max(seconds for *_, seconds in results.values()) < 12
