"""Errors that all ranks learn of at the same step: each rank raises, nothing of the step stays, and fit works again.

Fails, for example, if Stages.prefetch raises instead of keeping the error (the other rank then waits until it reads of
a failure), or if _HostAgreement.finish looks only at its own rank's flag.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nestpipe import Batch, Jagged, Pooled, Table, Trainer, World
from nestpipe.distributed import RankError
from nestpipe.pipelining import NonFiniteError
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of
from tests.ranks import run_ranks
from tests.schedules import OUTER

CASE = Case("adagrad", "pooled_sum", 2, steps=6)
BAD_STEP = 3


class BrokenFileError(Exception):
    pass


ERRORS: dict[str, tuple[type[Exception], str]] = {
    "reader": (BrokenFileError, "part 7 is truncated"),
    "key": (ValueError, "key 999 is outside 0 .. 59, the keys of table 'tag' (num_keys = 60)"),
    "feature": (ValueError, "missing ['tags'], unknown ['tagz']"),
    "offsets": (ValueError, "feature 'items': offsets must begin with 0"),
    "dtype": (ValueError, "feature 'items': values must be a 1-dimensional int64 tensor, got torch.int32"),
    "weight": (ValueError, "the weight of a batch is nan, must be >= 0"),
    "weights": (ValueError, "the batch has 9 weights; at most 8 losses are supported"),
    "dense_nan": (NonFiniteError, f"step {BAD_STEP}: a loss or a gradient is not finite on some rank"),
    "nan": (NonFiniteError, f"step {BAD_STEP}: a loss or a gradient is not finite on some rank"),
}


def spoiled(batches: list[Batch], kind: str) -> Iterator[Batch]:
    for number, batch in enumerate(batches):
        if number != BAD_STEP:
            yield batch
        elif kind == "reader":
            raise BrokenFileError("part 7 is truncated")
        elif kind == "key":
            tags = batch.keys["tags"]
            values = torch.cat([tags.values[:-1], torch.tensor([999])])
            yield replace(batch, keys={**batch.keys, "tags": replace(tags, values=values)})
        elif kind == "feature":
            yield replace(batch, keys={"items": batch.keys["items"], "tagz": batch.keys["tags"]})
        elif kind == "dense_nan":
            yield batch
        elif kind == "weight":
            yield replace(batch, weight=float("nan"))
        elif kind == "weights":
            yield replace(batch, weight={str(name): 1.0 for name in range(9)})
        elif kind == "nan":
            yield replace(batch, inputs={"label": batch.inputs["label"] * float("nan")})
        elif kind == "offsets":
            items = batch.keys["items"]
            yield replace(batch, keys={**batch.keys, "items": Jagged(items.values, items.offsets.flip(0))})
        elif kind == "dtype":
            items = batch.keys["items"]
            yield replace(batch, keys={**batch.keys, "items": Jagged(items.values.int(), items.offsets)})


Outcome = tuple[str, str, float, bool, int]
"""The error's type, its text, the time it took, whether rows are as after the last good step, and the steps in the
end."""


def fail_in_ways(world: World, schedule: str) -> dict[str, Outcome]:
    """Trains until each kind of error, and goes on, with trainers of their own."""
    batches = share_of(global_batches(CASE.steps), world)
    expected = make_trainer(world, CASE)
    expected.fit(batches[:BAD_STEP])
    digest = expected.digest()
    return {kind: fail_and_go_on(world, kind, schedule, batches, digest) for kind in ERRORS}


def fail_and_go_on(world: World, kind: str, schedule: str, batches: list[Batch], expected: str) -> Outcome:
    case = replace(CASE, schedule=schedule)
    bad_rank = world.size - 1
    trainer = make_trainer(world, case)
    spoils = kind == "dense_nan" and world.rank == bad_rank  # a dense gradient: no row carries it to the other rank
    hook = trainer.model.second.register_hook(
        lambda g: g * float("nan") if spoils and trainer.num_steps == BAD_STEP else g
    )
    started = time.perf_counter()
    try:
        trainer.fit(spoiled(batches, kind) if world.rank == bad_rank else batches)
        raised: Exception = AssertionError("nothing was raised")
    except Exception as error:
        raised = error
    seconds = time.perf_counter() - started
    unchanged = trainer.digest() == expected
    hook.remove()
    trainer.fit(batches[BAD_STEP:])
    return type(raised).__name__, str(raised), seconds, unchanged, trainer.num_steps


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_raises_and_goes_on(schedule: str, size: int) -> None:
    results = on_ranks(size, fail_in_ways, schedule)
    for kind in ERRORS:
        check_outcomes([outcomes[kind] for outcomes in results], *ERRORS[kind])


def check_outcomes(outcomes: list[Outcome], error: type[Exception], text: str) -> None:
    for rank, (name, message, seconds, unchanged, num_steps) in enumerate(outcomes):
        is_bad = rank == len(outcomes) - 1
        assert name == (error if is_bad or error is NonFiniteError else RankError).__name__, message
        assert text in message
        if not is_bad and error is not NonFiniteError:
            assert f"rank {len(outcomes) - 1} failed: {error.__name__}: " in message
        assert seconds < 10, text
        assert unchanged, text
        assert num_steps == CASE.steps, text


RETURNED = {
    "vector": (lambda loss: loss.expand(3), "returned a tensor of shape [3] as its loss"),
    "nothing": (lambda loss: None, "returned NoneType as its loss"),
    "number": (lambda loss: 0.5, "returned float as its loss"),
    "unknown": (lambda loss: {"click": loss}, "returned losses ['click'], the batch has weights for ['']"),
}


def train_wrong_model(world: World, kind: str, check_split: bool) -> tuple[str, str, float, int, int]:
    trainer = make_trainer(world, CASE)
    trainer.check_split = check_split
    forward, wrong = trainer.model.forward, RETURNED[kind][0]
    trainer.model.forward = lambda *arguments: wrong(forward(*arguments))
    started = time.perf_counter()
    try:
        trainer.fit(share_of(global_batches(1), world))
        raised: Exception = AssertionError("nothing was raised")
    except Exception as error:
        raised = error
    seconds = time.perf_counter() - started
    return type(raised).__name__, str(raised), seconds, trainer.num_steps, trainer.store.size("item")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("check_split", [True, False])
@pytest.mark.parametrize("kind", RETURNED)
def test_models_that_return_no_sum(size: int, check_split: bool, kind: str) -> None:
    arguments = (kind, check_split)
    results = [train_wrong_model(World(), *arguments)] if size == 1 else run_ranks(size, train_wrong_model, *arguments)
    for name, message, seconds, num_steps, num_rows in results:
        assert name in ("ValueError", "RankError")
        assert RETURNED[kind][1] in message
        assert seconds < 10
        assert (num_steps, num_rows) == (0, 0)
    assert any(name == "ValueError" for name, *_ in results)


class MeanModel(torch.nn.Module):
    """Returns the mean of the samples' losses, not their sum."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, embeddings, inputs):
        return self.model(embeddings, inputs) / len(inputs["label"])


def train_mean(world: World) -> tuple[str, str, float, int]:
    trainer = make_trainer(world, CASE)
    trainer.model = MeanModel(trainer.model)
    started = time.perf_counter()
    try:
        trainer.fit(share_of(global_batches(1), world))
        raised: Exception = AssertionError("nothing was raised")
    except Exception as error:
        raised = error
    return type(raised).__name__, str(raised), time.perf_counter() - started, trainer.num_steps


@pytest.mark.parametrize("size", [1, 2])
def test_model_that_returns_a_mean(size: int) -> None:
    for name, message, seconds, num_steps in [train_mean(World())] if size == 1 else run_ranks(size, train_mean):
        assert name in ("SplitError", "RankError")
        assert "when the batch is cut in two" in message
        assert seconds < 10
        assert num_steps == 0


def run_out_of_rows(world: World, schedule: str) -> tuple[str, str, float, bool, int]:
    """Trains with at most 20 item rows on the last rank."""
    bad = world.rank == world.size - 1

    def trainer_with_room(max_rows: int | None) -> Trainer:
        trainer = make_trainer(world, CASE)
        item = replace(trainer.features["items"].table, max_rows=max_rows)
        features = {**trainer.features, "items": replace(trainer.features["items"], table=item)}
        return Trainer(
            trainer.model,
            features,
            dense_optimizer=lambda p: torch.optim.Adam(p, 0.01),
            world=world,
            schedule=schedule,
            seed=3,
        )

    batches = share_of(global_batches(CASE.steps), world)
    trainer = trainer_with_room(20 if bad else None)
    started = time.perf_counter()
    try:
        trainer.fit(batches)
        raised: Exception = AssertionError("nothing was raised")
    except Exception as error:
        raised = error
    seconds = time.perf_counter() - started
    expected = trainer_with_room(None)
    expected.fit(batches[: trainer.num_steps])
    return type(raised).__name__, str(raised), seconds, trainer.digest() == expected.digest(), trainer.num_steps


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("size", [1, 2])
def test_max_rows_reached(schedule: str, size: int) -> None:
    """Fails if retrieve does not call room_error: the native store refuses too, but after the dense step."""
    results = on_ranks(size, run_out_of_rows, schedule)
    for rank, (name, message, seconds, unchanged, num_steps) in enumerate(results):
        assert name == ("ValueError" if rank == size - 1 else "RankError")
        assert "table 'item' would have" in message
        assert "more than its max_rows = 20" in message
        assert seconds < 10
        assert unchanged
        assert num_steps < CASE.steps


def two_tables_of_one_name(world: World) -> str:
    features = {"a": Pooled(Table("item", 4)), "b": Pooled(Table("item", 4))}
    try:
        Trainer(torch.nn.Linear(1, 1), features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), world=world)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("size", [1, 2])
def test_two_tables_of_one_name(size: int) -> None:
    for text in [two_tables_of_one_name(World())] if size == 1 else run_ranks(size, two_tables_of_one_name):
        assert "feature 'b' has a table 'item' that is not the one other features have under this name" in text
