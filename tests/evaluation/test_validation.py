"""Validation and early stopping: all ranks leave at the same step, and the model is not affected.

Fails, for example, if _is_stopped_by does not ask the other ranks, if Stages.untrained forgets a batch, or if
Pipeline.__iter__ goes on after stop().
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nestpipe
from nestpipe import Batch, World
from nestpipe.evaluation.validation import Validation
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of
from tests.schedules import OUTER

CASE = Case("adam", "shared", 2)


class StopAt:
    """Stops at a step, on one rank only."""

    every = 2

    def __init__(self, step: int, rank: int) -> None:
        self.step = step
        self.rank = rank

    def __call__(self, trainer: Trainer, result: FitResult) -> bool:
        return trainer.num_steps == self.step and trainer.world.rank == self.rank


def stop_and_go_on(world: World, schedule: str) -> tuple[str, str, int, list[int], int]:
    """Stops at step 6 by the last rank, then trains the rest of 11 batches. Returns digests and counts."""
    num_pulled = 0

    def reader() -> Iterator[Batch]:
        nonlocal num_pulled
        for batch in share_of(global_batches(11), world):
            num_pulled += 1
            yield batch

    trainer, batches = make_trainer(world, replace(CASE, schedule=schedule)), reader()
    result = trainer.fit(batches, callbacks=[StopAt(6, world.size - 1)])
    stopped, num_steps = trainer.digest(), trainer.num_steps
    assert result.is_stopped
    assert len(result.losses) == len(result.times) == 6
    rest = trainer.fit(batches)
    return stopped, trainer.digest(), num_steps, [t.number for t in result.times + rest.times], num_pulled


def in_one_go(world: World, steps: int) -> str:
    trainer = make_trainer(world, CASE)
    trainer.fit(iter(share_of(global_batches(11), world)), steps=steps)
    return trainer.digest()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("schedule", OUTER)
def test_stopped_is_as_if_no_more_had_been_asked_for(schedule: str, size: int) -> None:
    expected = on_ranks(size, in_one_go, 6)[0], on_ranks(size, in_one_go, 11)[0]
    for stopped, whole, num_steps, numbers, num_pulled in on_ranks(size, stop_and_go_on, schedule):
        assert (stopped, whole) == expected
        assert num_steps == 6
        assert numbers == list(range(11))
        assert num_pulled == 11


def stop_at_the_last_step(world: World, schedule: str) -> tuple[str, int]:
    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    trainer.fit(share_of(global_batches(11), world), steps=6, callbacks=[StopAt(6, 0)])
    return trainer.digest(), trainer.num_steps


@pytest.mark.parametrize("schedule", OUTER)
def test_stop_at_the_last_step(schedule: str) -> None:
    assert stop_at_the_last_step(World(), schedule) == (in_one_go(World(), 6), 6)


def validate_while_training(world: World, schedule: str, values: list[float], path: Path | None = None):
    """Takes the numbers from a list. The evaluation is real, and flushes."""
    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    held_out = share_of(global_batches(13)[11:], world)
    numbers = iter(values)

    def function(trainer: Trainer) -> dict[str, float]:
        return {"loss": next(numbers), "true_loss": nestpipe.evaluate(trainer, held_out).loss}

    validation = Validation(2, function, patience=2, save_best=path)
    result = trainer.fit(share_of(global_batches(11), world), callbacks=[validation])
    return trainer.num_steps, trainer.digest(), result.validations, validation.best["step"] if validation.best else None


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("schedule", OUTER)
def test_patience(schedule: str, size: int) -> None:
    """Step 4 is best; steps 6 (equal) and 8 (nan) are not better. The digest is that of a run without validation."""
    values = [3.0, 2.0, 2.0, math.nan, 1.0]
    results = on_ranks(size, validate_while_training, schedule, values)
    for num_steps, digest, validations, best in results:
        assert num_steps == 8
        assert digest == on_ranks(size, in_one_go, 8)[0]
        assert [v["step"] for v in validations] == [2, 4, 6, 8]
        assert best == 4
    assert len({result[2][0]["true_loss"] for result in results}) == 1


def test_validation_sees_current_rows() -> None:
    """Fails if evaluate does not flush: the last batch's rows are on the device only."""
    values = [5.0, 4.0, 3.0, 2.0, 1.0]
    serial, *others = [validate_while_training(World(), schedule, values) for schedule in SCHEDULES]
    assert [v["true_loss"] for v in serial[2]] != [serial[2][0]["true_loss"]] * 5
    for other in others:
        assert other == serial


def test_the_best_is_saved(tmp_path: Path) -> None:
    validate_while_training(World(), "nested", [3.0, 2.0, 2.5, 2.0], tmp_path / "best")
    trainer = make_trainer(World(), CASE)
    trainer.load(tmp_path / "best")
    assert trainer.digest() == in_one_go(World(), 4)


@pytest.mark.parametrize(
    ("metric", "mode", "values", "stops_at"),
    [
        ("auc", None, [0.5, 0.6, 0.7, 0.6, 0.6], 10),
        ("auc", "lower", [0.5, 0.6, 0.7, 0.4, 0.3], 6),
        ("log_loss", None, [0.5, 0.6, 0.4, 0.5, 0.5], 10),
        ("loss", None, [math.nan, math.nan, 1.0, 1.0, 1.0], 4),
    ],
)
def test_modes(metric: str, mode: str | None, values: list[float], stops_at: int) -> None:
    numbers = iter(values)
    trainer = make_trainer(World(), CASE)
    validation = Validation(2, lambda _: {metric: next(numbers)}, metric=metric, mode=mode, patience=2)
    trainer.fit(global_batches(11), callbacks=[validation])
    assert trainer.num_steps == stops_at


def test_time_of_validation_is_no_time_of_a_step() -> None:
    """Fails if fit calls callbacks before the step has ended."""
    trainer, result, num_ended = make_trainer(World(), CASE), FitResult(), []

    def count(_: Trainer) -> dict[str, float]:
        num_ended.append(len(result.times))
        return {"loss": 1.0}

    trainer.fit(global_batches(5), result=result, callbacks=[Validation(2, count)])
    assert num_ended == [2, 4]


class SlowOnOneRank:
    method = "dense"

    def update(self, outputs, inputs, keys) -> None:
        time.sleep(3)

    def compute(self, channel) -> dict[str, float]:
        return {"loss": 1.0}


def slow_validation(world: World) -> int:
    """Evaluates for three times as long as other ranks would wait for one that hangs."""
    world.watch.timeout_seconds = 1.0
    trainer = make_trainer(world, CASE)
    trainer.model.dense = lambda embeddings, inputs: torch.zeros(1)
    metrics = [SlowOnOneRank()] if world.rank == 0 else []
    trainer.model.forward = lambda embeddings, inputs: sum(v.sum() for v in trainer.model.parameters())
    return nestpipe.evaluate(trainer, share_of(global_batches(1), world), metrics).num_samples


def test_long_evaluation_sends_heartbeats() -> None:
    """Fails without watch.busy() in evaluate: rank 1 gives rank 0 up."""
    assert on_ranks(2, slow_validation) == [24, 24]


def unknown_metric(world: World) -> tuple[str, int]:
    trainer = make_trainer(world, CASE)
    batches = iter(share_of(global_batches(11), world))
    text = ""
    try:
        trainer.fit(batches, callbacks=[Validation(3, lambda _: {"loss": 1.0}, metric="acu")])
    except ValueError as error:
        text = str(error)
    trainer.fit(batches)
    return text, trainer.num_steps


def test_unknown_metric_on_all_ranks() -> None:
    assert on_ranks(2, unknown_metric) == [("there is no metric 'acu'; there are loss", 11)] * 2


def broken_reader(world: World, schedule: str) -> tuple[int, str, int]:
    """Stops training after the reader's error was pulled ahead. The next fit raises it."""

    def reader() -> Iterator[Batch]:
        yield from share_of(global_batches(7), world)
        if world.rank == world.size - 1:
            raise OSError("part 7 is truncated")

    trainer, batches = make_trainer(world, replace(CASE, schedule=schedule)), reader()
    trainer.fit(batches, callbacks=[StopAt(6, 0)])
    num_stopped, text = trainer.num_steps, ""
    try:
        trainer.fit(batches)
    except Exception as error:
        text = str(error)
    return num_stopped, text, trainer.num_steps


@pytest.mark.parametrize("schedule", OUTER)
def test_an_error_pulled_ahead_is_not_lost(schedule: str) -> None:
    """Fails if Stages.untrained leaves out errors."""
    for num_stopped, text, num_steps in on_ranks(2, broken_reader, schedule):
        assert (num_stopped, num_steps) == (6, 7)
        assert "part 7 is truncated" in text


def test_refusals() -> None:
    with pytest.raises(ValueError, match="every is 0"):
        Validation(0, lambda _: {})
    with pytest.raises(ValueError, match="patience is 0"):
        Validation(1, lambda _: {}, patience=0)
    with pytest.raises(ValueError, match="mode is 'min'"):
        Validation(1, lambda _: {}, mode="min")
