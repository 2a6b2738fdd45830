"""Failures on a lane, in an update or between calls of fit: no row is lost or wrong, no batch is forgotten, and every
wait ends; in every schedule as in serial.

Fails, for example, if Executor.drain raises before all lanes are done, if a lane continues after a failure, if
Stages.route counts batches that are not steps, or if BatchSource.give_back appends.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import nestpipe
from nestpipe import Batch, Jagged, Pooled, Table, Trainer, World, init, optim
from nestpipe.checkpoint import CheckpointError
from nestpipe.optim import RowOptimizer
from tests.exactness.cases import (
    Case,
    global_batches,
    make_trainer,
    on_ranks,
    share_of,
)
from tests.schedules import OUTER

CASE = Case("adagrad", "shared", 2)


def digest_after(num_steps: int, num_micro_batches: int = CASE.num_micro_batches) -> str:
    trainer = make_trainer(World(), replace(CASE, num_micro_batches=num_micro_batches))
    trainer.fit(global_batches(9), steps=num_steps)
    return trainer.digest()


def bad_input(world: World, schedule: str, path) -> tuple[int, list[str], str, str, int]:
    """Trains with a list among the inputs of batch 3 on the last rank, which cannot go to a device. Takes a digest
    after each step, and saves after the error."""
    batches = share_of(global_batches(9), world)
    if world.rank == world.size - 1:
        batches[3] = replace(batches[3], inputs={**batches[3].inputs, "label": [0.0] * len(batches[3])})
    trainer = make_trainer(world, replace(CASE, num_micro_batches=1, schedule=schedule))
    trainer.check_split = False
    digests: list[str] = []
    try:
        trainer.fit(batches, after_step=lambda _: digests.append(trainer.digest()))
    except Exception as error:
        name = type(error).__name__
    num_steps = trainer.num_steps
    trainer.save(path)
    loaded = make_trainer(world, replace(CASE, num_micro_batches=1, schedule=schedule))
    loaded.load(path)
    trainer.fit(batches[4:])
    return num_steps, digests, loaded.digest(), name, trainer.num_steps


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("size", [1, 2])
def test_an_input_that_is_not_a_tensor(schedule: str, size: int, tmp_path) -> None:
    results = on_ranks(size, bad_input, schedule, tmp_path / "save")
    assert results[-1][3] == "TypeError"
    for num_steps, digests, loaded, name, in_the_end in results:
        assert (num_steps, in_the_end) == (3, 8)
        assert loaded == digests[-1]
        assert name in ("TypeError", "RankError")
        if size == 1:
            assert digests == [digest_after(number, num_micro_batches=1) for number in (1, 2, 3)]


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_write_back_that_fails_once(schedule: str, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error occurs during the dense optimizer's step. It must not be raised before the rows are updated too, or the
    step would be left halfway. Fails if Executor._play waits for an operation without dependencies."""
    trainer = make_trainer(World(), replace(CASE, schedule=schedule))
    num_calls, in_optimizer = 0, threading.Event()
    trainer.optimizer.register_step_pre_hook(lambda *_: in_optimizer.set())
    trainer.optimizer.register_step_post_hook(lambda *_: time.sleep(0.02))

    def fails_once(name: str):
        original = getattr(trainer.store, name)

        def scatter(*arguments, **keywords):
            nonlocal num_calls
            num_calls += 1
            if num_calls == failing:
                in_optimizer.clear()
                in_optimizer.wait(0.5)
                raise MemoryError("no memory for the table")
            original(*arguments, **keywords)

        monkeypatch.setattr(trainer.store, name, scatter)

    fails_once("_scatter_tables")
    fails_once("_update_tables")
    with pytest.raises(MemoryError, match="no memory for the table"):
        trainer.fit(global_batches(9))
    assert 0 < trainer.num_steps < 9
    assert trainer.digest() == digest_after(trainer.num_steps)


class Raising(RowOptimizer):
    """Fails in the fourth step."""

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        if step == 4:
            raise ZeroDivisionError("in the row optimizer")
        rows.sub_(gradient * lr)


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, embeddings, inputs) -> Tensor:
        return self.scale * (embeddings["a"].square().sum() + embeddings["b"].square().sum())


@pytest.mark.parametrize("schedule", OUTER)
def test_an_update_that_fails_halfway(schedule: str, tmp_path) -> None:
    """Table a and the dense parameters have been updated when the update of table b fails. The trainer refuses to
    continue until a checkpoint is loaded."""
    features = {
        "a": Pooled(Table("a", 2, init=init.Constant(1.0), optimizer=optim.SGD(0.1))),
        "b": Pooled(Table("b", 2, init=init.Constant(1.0), optimizer=Raising(0.1))),
    }
    keys = Jagged.from_lists([[1], [2], [3]])
    batch = Batch({"a": keys, "b": keys})
    trainer = Trainer(TwoTables(), features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.0), schedule=schedule)
    trainer.fit([batch] * 2)
    trainer.save(tmp_path / "save")
    expected = trainer.digest()
    with pytest.raises(ZeroDivisionError):
        trainer.fit([batch] * 5)
    assert trainer.num_steps == 3
    with pytest.raises(RuntimeError, match="a step was left halfway"):
        trainer.save(tmp_path / "wrong")
    with pytest.raises(RuntimeError, match="a step was left halfway"):
        trainer.fit([batch])
    trainer.load(tmp_path / "save")
    assert trainer.digest() == expected


def numbered(numbers: list[int], samples: int = 3) -> Iterator[Batch]:
    """Yields batches whose labels are their numbers. A negative number gives a batch that is refused."""
    for number in numbers:
        keys = Jagged.one_each(torch.full((samples,), abs(number)))
        batch = Batch({"items": keys, "tags": keys}, {"label": torch.full((samples,), float(abs(number)))})
        yield batch if number >= 0 else replace(batch, weight=float("nan"))


class Recorder(nn.Module):
    """Records the numbers of the batches that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.seen: list[int] = []

    def forward(self, embeddings, inputs) -> Tensor:
        if torch.is_grad_enabled():
            self.seen.append(int(inputs["label"][0]))
        return self.scale * embeddings["items"].sum()


def recording_trainer(schedule: str, check_split: bool) -> Trainer:
    trainer = make_trainer(World(), Case("sgd", "shared"))
    return Trainer(
        Recorder(),
        trainer.features,
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
        schedule=schedule,
        check_split=check_split,
    )


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("check_split", [True, False])
def test_no_batch_is_lost_between_calls(schedule: str, check_split: bool) -> None:
    trainer = recording_trainer(schedule, check_split)
    batches = numbered([0, 1, -2, 3, 4, 5, 6, 7, 8])
    with pytest.raises(ValueError, match="weight of a batch is nan"):
        trainer.fit(batches)
    for _ in range(3):
        trainer.fit(batches, steps=1)
    trainer.fit(batches)
    assert trainer.model.seen == [0, 1, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("schedule", OUTER)
def test_small_batches_at_the_beginning(schedule: str) -> None:
    """check_split looks for a batch with two samples. The batches that it pulled are trained all the same."""
    trainer = recording_trainer(schedule, check_split=True)
    batches = numbered(list(range(20)), samples=1)
    trainer.fit(batches, steps=3)
    trainer.fit(batches, steps=2)
    trainer.fit(batches)
    assert trainer.model.seen == list(range(20))


@pytest.mark.parametrize("schedule", OUTER)
def test_loading_forgets_what_was_pulled(schedule: str, tmp_path) -> None:
    trainer = recording_trainer(schedule, check_split=False)
    trainer.save(tmp_path / "save")
    batches = numbered([0, -1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="weight of a batch is nan"):
        trainer.fit(batches)
    trainer.load(tmp_path / "save")
    trainer.fit(batches, steps=1)
    assert trainer.model.seen[1] >= 2
    assert trainer.num_steps == 1


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("check_split", [True, False])
def test_steps_count_steps(schedule: str, check_split: bool) -> None:
    """A batch of weight 0 is not a step, and no batch is pulled beyond the last step."""
    pulled = 0

    def reader() -> Iterator[Batch]:
        nonlocal pulled
        for number, batch in enumerate(global_batches(9)):
            pulled += 1
            yield replace(batch, weight=0.0) if number == 1 else batch

    trainer = make_trainer(World(), replace(CASE, schedule=schedule))
    trainer.check_split = check_split
    result = trainer.fit(reader(), steps=3)
    assert (trainer.num_steps, result.num_skipped, pulled) == (3, 1, 4)


@pytest.mark.parametrize("schedule", OUTER)
def test_interrupted_while_the_reader_blocks(schedule: str) -> None:
    """fit ends at once. Applied steps are counted, and their rows are in the store."""
    blocked = threading.Event()

    def reader() -> Iterator[Batch]:
        yield from global_batches(9)[:4]
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        blocked.wait(20)

    trainer = make_trainer(World(), replace(CASE, schedule=schedule))
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(reader())
    assert time.perf_counter() - started < 10
    blocked.set()
    assert trainer.num_steps == 4
    assert trainer.digest() == digest_after(4)


@pytest.mark.parametrize("schedule", OUTER)
def test_not_within_fit(schedule: str, tmp_path) -> None:
    trainer = make_trainer(World(), replace(CASE, schedule=schedule))
    trainer.save(tmp_path / "save")
    for what, call in (
        ("import_rows", lambda _: trainer.import_rows("item", torch.tensor([1]), torch.zeros(1, 5))),
        ("load", lambda _: trainer.load(tmp_path / "save")),
    ):
        with pytest.raises(RuntimeError, match=f"{what} was called within fit"):
            trainer.fit(global_batches(2), after_step=call)


@pytest.mark.parametrize("schedule", OUTER)
def test_export_within_fit_sees_the_newest_rows(schedule: str) -> None:
    exported = {}
    for name in ("serial", schedule):
        trainer = make_trainer(World(), replace(CASE, schedule=name))
        parts: list[Tensor] = []
        trainer.fit(
            global_batches(5), after_step=lambda _, t=trainer, p=parts: p.append(t.export_embedding("item")[1].weight)
        )
        exported[name] = parts
    assert all(map(torch.equal, exported["serial"], exported[schedule]))


def start_differently(world: World) -> tuple[str, int]:
    trainer = make_trainer(world, CASE)
    start = trainer.model.second.detach().clone()
    with torch.no_grad():
        trainer.model.second += world.rank
    try:
        trainer.fit(share_of(global_batches(2), world))
    except ValueError as error:
        text = str(error)
    with torch.no_grad():
        trainer.model.second.copy_(start)
    trainer.fit(share_of(global_batches(2), world))
    return text, trainer.num_steps


def test_ranks_that_start_from_different_parameters() -> None:
    for text, num_steps in on_ranks(2, start_differently):
        assert "the ranks' models start from different parameters" in text
        assert num_steps == 2


def save_twice(world: World, path, schedule: str) -> tuple[str, bool]:
    """Saves within fit. The first save fails, and training continues."""
    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    texts: list[str] = []

    def after_step(_) -> None:
        try:
            trainer.save("/proc/nestpipe" if trainer.num_steps == 1 else path)
        except CheckpointError as error:
            texts.append(str(error))

    trainer.fit(share_of(global_batches(3), world), after_step=after_step)
    loaded = make_trainer(world, replace(CASE, schedule=schedule))
    loaded.load(path)
    return texts[0], loaded.digest() == trainer.digest()


@pytest.mark.parametrize("schedule", OUTER)
def test_a_failed_save_is_survived(schedule: str, tmp_path) -> None:
    for text, same in on_ranks(2, save_twice, tmp_path / "save", schedule):
        assert "saving to /proc/nestpipe failed" in text
        assert same


def unused_parameter(world: World) -> tuple[bool, bool]:
    """Returns whether a parameter that no rank uses, and one that only rank 0 uses, have a gradient."""
    model = nn.Module()
    model.unused, model.first = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = nestpipe.DenseReducer(model, world)
    if world.rank == 0:
        model.first.sum().backward()
    reducer.finish()
    return model.unused.grad is not None, model.first.grad is not None and model.first.grad.tolist() == [1.0, 1.0]


def test_parameters_that_some_ranks_or_all_do_not_use() -> None:
    assert on_ranks(2, unused_parameter) == [(False, True)] * 2
