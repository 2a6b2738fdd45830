"""Stages that the compute lane does itself, because they are short.

Fails if LightStages.is_light ignores how long a stage took, if Executor._is_light ignores earlier operations of the
lane, or if Executor._do_inline raises an error of a stage instead of keeping it.
"""

import math
from dataclasses import replace
from threading import Event, current_thread, main_thread

import pytest

from nestpipe.distributed import World
from nestpipe.pipelining import light
from nestpipe.pipelining.executor import Executor
from nestpipe.pipelining.light import FIRST_PAUSE, NUM_AVERAGED, LightStages
from nestpipe.pipelining.schedule import OVERLAPPING, Op
from nestpipe.pipelining.stage import COMPUTE
from nestpipe.pipelining.stages import Stages
from nestpipe.pipelining.trace import Trace
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of

LIGHT_SECONDS = 1.5e-3
CASE = Case("adagrad", "shared", num_micro_batches=3, steps=12, window="once")


def test_short_on_average() -> None:
    stages = LightStages(LIGHT_SECONDS)
    for _ in range(NUM_AVERAGED):
        assert not stages.is_light("retrieve")
        stages.record("retrieve", LIGHT_SECONDS / 2, 1.0, is_inline=False)
    assert stages.is_light("retrieve")
    assert not stages.is_light("prefetch")
    for _ in range(NUM_AVERAGED):
        stages.record("retrieve", 2 * LIGHT_SECONDS, 1.0, is_inline=False)
    assert not stages.is_light("retrieve")


def test_what_waits_is_not_light() -> None:
    """A reader that waits for a disk takes time, but no CPU time. It returns to its lane, and is tried again later."""
    stages = LightStages(LIGHT_SECONDS)
    for _ in range(NUM_AVERAGED):
        stages.record("prefetch", 0.0, 0.02, is_inline=False)
    for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE):
        assert stages.is_light("prefetch")
        stages.record("prefetch", 0.0, 0.02, is_inline=True)
        for _ in range(pause):
            assert not stages.is_light("prefetch")
            stages.record("prefetch", 0.0, 0.02, is_inline=False)


def test_the_order_of_a_lane_stays() -> None:
    """A short operation does not overtake an earlier one of its lane, even if it does not depend on it."""
    done: list[tuple[str, bool]] = []
    goes_on = Event()

    def long_one(op: Op) -> None:
        goes_on.wait(10)
        done.append(("write_back", current_thread() is main_thread()))

    def short_one(op: Op) -> None:
        done.append(("retrieve", current_thread() is main_thread()))

    listed = [Op("write_back", "host", 0), Op("retrieve", "host", 1), Op("begin", COMPUTE, 1)]
    short = LightStages(math.inf)
    for _ in range(NUM_AVERAGED):
        short.record("retrieve", 0.0, 0.0, is_inline=False)
    world, actions = World(), {"write_back": long_one, "retrieve": short_one}
    executor = Executor(iter(listed), actions, Trace(), world.watch, world.streams, light=short)
    executor.play_until("begin")
    goes_on.set()
    executor.drain()
    executor.close()
    assert done == [("write_back", False), ("retrieve", False)]


def train(world: World, schedule: str, light_seconds: float) -> tuple[str, set[str]]:
    """Returns the digest, and the stages that the main thread did."""
    light.LIGHT_SECONDS, light.NUM_AVERAGED = light_seconds, 1
    main_stages = set()
    originals = {name: getattr(Stages, name) for name in ("prefetch", "route", "retrieve", "write_back")}

    def watched(name: str):
        def stage(self: Stages, op) -> None:
            if current_thread() is main_thread():
                main_stages.add(name)
            originals[name](self, op)

        return stage

    try:
        for name in originals:
            setattr(Stages, name, watched(name))
        trainer = make_trainer(world, replace(CASE, schedule=schedule))
        trainer.fit(share_of(global_batches(CASE.steps), world))
    finally:
        for name, original in originals.items():
            setattr(Stages, name, original)
        light.LIGHT_SECONDS, light.NUM_AVERAGED = 0.0, NUM_AVERAGED
    return trainer.digest(), main_stages


def train_every_way(world: World) -> dict[str, tuple[str, set[str]]]:
    ways = {schedule: train(world, schedule, math.inf) for schedule in OVERLAPPING}
    return {"serial": train(world, "serial", 0.0), "lanes": train(world, "nested", 0.0), **ways}


@pytest.mark.parametrize("ranks", [1, 2])
def test_same_bits(ranks: int) -> None:
    for ways in on_ranks(ranks, train_every_way):
        assert len({digest for digest, _ in ways.values()}) == 1
        assert ways["lanes"][1] == set()
        for schedule in OVERLAPPING:
            # Among several ranks route stays on its lane, and so may stages that wait for it.
            expected = {"prefetch", "route", "retrieve", "write_back"} if ranks == 1 else set()
            assert expected <= ways[schedule][1]
            assert ("route" in ways[schedule][1]) == (ranks == 1)


@pytest.mark.parametrize("light_seconds", [0.0, math.inf])
def test_errors_come_where_those_of_lanes_do(light_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the store is raised by the step that needs the rows. Earlier steps are applied."""
    original = Stages.retrieve

    def fails_for_batch_4(self: Stages, op: Op) -> None:
        if op.batch == 4:
            raise MemoryError("no memory for the rows")
        original(self, op)

    monkeypatch.setattr(light, "LIGHT_SECONDS", light_seconds)
    monkeypatch.setattr(light, "NUM_AVERAGED", 1)
    monkeypatch.setattr(Stages, "retrieve", fails_for_batch_4)
    trainer = make_trainer(World(), replace(CASE, schedule="inter"))
    with pytest.raises(MemoryError, match="no memory for the rows"):
        trainer.fit(global_batches(6))
    assert trainer.num_steps == 4
