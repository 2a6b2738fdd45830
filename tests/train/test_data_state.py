"""Trainer.data_state is the position after the trained batches, however far the pipeline has read ahead.

Fails, for example, if BatchSource.advance_to counts batches that were only pulled, or if `fit` does not call it before
the callbacks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe import Batch, World
from nestpipe.data.dataset import Batches
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer
from tests.exactness.cases import GLOBAL_BATCH, Case, global_batches, make_trainer, on_ranks

CASE = Case("adam", "shared", 2)


class Listed:
    """The samples of global batches, as a dataset."""

    def __init__(self, num_batches: int) -> None:
        self.batches = global_batches(num_batches)
        self.num_samples = num_batches * GLOBAL_BATCH

    def samples(self, first: int, count: int) -> Batch:
        number, offset = divmod(first, GLOBAL_BATCH)
        return self.batches[min(number, len(self.batches) - 1)][offset : offset + count]


def batches_of(world: World, num_batches: int = 9) -> Batches:
    return Batches(Listed(num_batches), GLOBAL_BATCH // world.size, world.rank, world.size)


class Positions:
    every = 2

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[tuple[int, int]] = []

    def __call__(self, trainer: Trainer, result: FitResult) -> bool:
        self.seen.append((trainer.num_steps, trainer.data_state()["position"]))
        trainer.save(self.path)
        return trainer.num_steps == 6


def save_and_go_on(world: World, schedule: str, path: Path) -> tuple[list[tuple[int, int]], str, str]:
    """Returns positions that callbacks see, the digest of a run resumed from the last save, and that of a whole run."""
    positions = Positions(path)
    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    trainer.fit(batches_of(world), callbacks=[positions])
    again, batches = make_trainer(world, replace(CASE, schedule=schedule)), batches_of(world)
    again.load(path)
    batches.load_state(again.data_state())
    again.fit(batches)
    whole = make_trainer(world, CASE)
    whole.fit(batches_of(world))
    return positions.seen, again.digest(), whole.digest()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_position_is_what_was_trained(schedule: str, size: int, tmp_path: Path) -> None:
    """In version 0.1 the state was up to three batches ahead, and save left it out."""
    for seen, continued, whole in on_ranks(size, save_and_go_on, schedule, tmp_path):
        assert seen == [(steps, steps * GLOBAL_BATCH) for steps in (2, 4, 6)]
        assert continued == whole


def test_ranks_with_a_state_each(tmp_path: Path) -> None:
    """Rank 1 has fewer batches. Fails if advance_to advances where a rank has no data left."""
    for rank, states in enumerate(on_ranks(2, own_states, tmp_path)):
        assert states[0] == states[1] == {"read": 3 - rank, "rank": rank}


class Counted:
    """Data of a user, whose state differs by rank and whose iterator is another object."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_read = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in global_batches(3 - self.world.rank):
            self.num_read += 1
            yield batch[self.world.rank :: self.world.size]

    def state(self) -> dict[str, int]:
        return {"read": self.num_read, "rank": self.world.rank}

    def load_state(self, state: Mapping[str, int]) -> None:
        raise NotImplementedError


def own_states(world: World, path: Path) -> tuple[object, object]:
    trainer = make_trainer(world, CASE)
    trainer.fit(Counted(world))
    trainer.save(path)
    again = make_trainer(world, CASE)
    again.load(path)
    return trainer.data_state(), again.data_state()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_that_failed_is_passed_over(schedule: str) -> None:
    """A failed batch is not retried, so the state is after it."""
    trainer = make_trainer(World(), replace(CASE, schedule=schedule))
    trainer.check_split, batches, forward = False, batches_of(World()), trainer.model.forward

    def spoiled(embeddings, inputs):
        if trainer.num_steps == 4:
            raise ValueError("of the model")
        return forward(embeddings, inputs)

    trainer.model.forward = spoiled
    with pytest.raises(ValueError, match="of the model"):
        trainer.fit(batches)
    assert trainer.data_state()["position"] == 5 * GLOBAL_BATCH
    trainer.model.forward = forward
    trainer.fit(batches, steps=1)
    assert trainer.data_state()["position"] == 6 * GLOBAL_BATCH


def test_data_without_a_state(tmp_path: Path) -> None:
    trainer = make_trainer(World(), CASE)
    trainer.fit(global_batches(1))
    trainer.save(tmp_path)
    assert trainer.data_state() is None
    again = make_trainer(World(), CASE)
    again.load(tmp_path)
    assert again.data_state() is None


class Weighted(Iterator[Batch]):
    """Batches, some of weight 0. The state is one dict, which keeps changing."""

    def __init__(self, weightless: tuple[int, ...]) -> None:
        self.batches = global_batches(8)
        self.weightless = weightless
        self.where = {"next": 0}

    def __next__(self) -> Batch:
        number = self.where["next"]
        if number == len(self.batches):
            raise StopIteration
        self.where["next"] += 1
        return replace(self.batches[number], weight=0.0) if number in self.weightless else self.batches[number]

    def state(self) -> dict[str, int]:
        return self.where

    def load_state(self, state: Mapping[str, int]) -> None:
        self.where = dict(state)


class SaveAll:
    every = 1

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, trainer: Trainer, result: FitResult) -> bool:
        trainer.save(self.path / str(trainer.num_steps))
        return trainer.num_steps == 2


@pytest.mark.parametrize(
    "schedule", [pytest.param(s, marks=pytest.mark.slow if s == "intra" else ()) for s in SCHEDULES]
)
@pytest.mark.parametrize("weightless", [(0, 1, 3, 7)])
def test_batches_that_weigh_nothing(schedule: str, weightless: tuple[int, ...], tmp_path: Path) -> None:
    """Fails if Stages.untrained gives back what was skipped, or if BatchSource keeps the dict itself."""
    trainer, data = make_trainer(World(), replace(CASE, schedule=schedule)), Weighted(weightless)
    saving = SaveAll(tmp_path)
    for _ in range(2):
        trainer.fit(data, callbacks=[saving])
    assert (trainer.num_steps, trainer.num_skipped) == (8 - len(weightless), len(weightless))
    trainer.fit(data)
    assert trainer.num_skipped == len(weightless)
    for steps in range(1, trainer.num_steps + 1):
        again, rest = make_trainer(World(), replace(CASE, schedule=schedule)), Weighted(weightless)
        again.load(tmp_path / str(steps))
        rest.load_state(again.data_state())
        again.fit(rest)
        assert (again.num_steps, again.digest()) == (trainer.num_steps, trainer.digest())


def test_a_state_that_is_none(tmp_path: Path) -> None:
    data = Weighted(())
    data.state = lambda: 3
    with pytest.raises(ValueError, match=r"state\(\) of Weighted returned 3, must return a mapping"):
        make_trainer(World(), CASE).fit(data)
    data = Weighted(())
    data.state = lambda: {"next": 1 // (3 - data.where["next"])}
    trainer = make_trainer(World(), CASE)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(data)
    assert trainer.num_steps == 2
