"""Continuing, stopping, evaluating and failing in the middle: in every schedule as in serial.

Fails, for example, if Pipeline._end does not flush, if Stages.untrained omits a batch, if `evaluate` does not flush
before it reads, or if prefetch pulls more batches than there are steps.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import nestpipe
from nestpipe import Batch, Jagged, Pooled, Table, World
from nestpipe.distributed import RankError
from nestpipe.pipelining import NonFiniteError
from nestpipe.pipelining.schedule import OVERLAPPING, SCHEDULES
from nestpipe.pipelining.trace import Trace
from tests.exactness.cases import (
    Case,
    SmallModel,
    features_of,
    global_batches,
    make_pipeline,
    make_trainer,
    on_ranks,
    share_of,
)
from tests.schedules import NESTED, OUTER

CASE = Case("adam", "shared", 2)


def fit_in_parts(world: World, schedule: str, parts: tuple[int, ...]) -> tuple[str, int]:
    """Trains from one iterator in several calls of fit. Returns the digest and the number of batches pulled."""
    num_pulled = 0

    def reader() -> Iterator[Batch]:
        nonlocal num_pulled
        for batch in share_of(global_batches(sum(parts) + 5), world):
            num_pulled += 1
            yield batch

    batches, trainer = reader(), make_trainer(world, replace(CASE, schedule=schedule))
    for steps in parts:
        trainer.fit(batches, steps=steps)
    return trainer.digest(), num_pulled


@pytest.mark.parametrize("schedule", NESTED)
@pytest.mark.parametrize("size", [1, 2])
def test_fit_in_parts_is_fit_at_once(schedule: str, size: int) -> None:
    whole = on_ranks(size, fit_in_parts, "serial", (40,))
    assert whole[0][1] == 40
    assert on_ranks(size, fit_in_parts, schedule, (20, 20)) == whole
    assert on_ranks(size, fit_in_parts, schedule, (1, 0, 2, 37)) == whole


def fail_and_go_on(world: World, schedule: str, kind: str) -> tuple[list[str], str, int]:
    """Trains with a bad batch 3 on the last rank, then calls fit again with the same iterator. That trains the batches
    that were pulled ahead, but not the bad one."""

    def reader() -> Iterator[Batch]:
        for number, batch in enumerate(share_of(global_batches(9), world)):
            if number == 3 and world.rank == world.size - 1:
                if kind == "weight":
                    batch = replace(batch, weight=float("nan"))
                else:
                    batch = replace(batch, inputs={"label": batch.inputs["label"] * float("nan")})
            yield batch

    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    batches, errors = reader(), []
    for _ in range(2):
        try:
            trainer.fit(batches)
        except (ValueError, NonFiniteError, RankError) as error:
            errors.append(type(error).__name__)
    return errors, trainer.digest(), trainer.num_steps


@pytest.mark.parametrize("kind", ["weight", "nan"])
@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_batches_pulled_ahead_are_not_lost(kind: str, size: int) -> None:
    expected = on_ranks(size, fail_and_go_on, "serial", kind)
    assert expected[-1][0] == ["ValueError" if kind == "weight" else "NonFiniteError"]
    assert expected[0][2] == 8
    for schedule in SCHEDULES:
        assert on_ranks(size, fail_and_go_on, schedule, kind) == expected


def evaluate_in_the_middle(world: World, schedule: str, every: int) -> tuple[list[float], str, list[str]]:
    """Returns losses of evaluations after some steps, the final digest, and digests in the middle."""
    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    batches = share_of(global_batches(12), world)
    losses: list[float] = []
    digests: list[str] = []

    def after_step(result) -> None:
        if every and trainer.num_steps % every == 0:
            losses.append(nestpipe.evaluate(trainer, share_of(global_batches(3), world)).loss)
            digests.append(trainer.digest())

    trainer.fit(batches, after_step=after_step)
    return losses, trainer.digest(), digests


@pytest.mark.parametrize("size", [1, 2])
def test_evaluation_in_the_middle(size: int) -> None:
    expected = on_ranks(size, evaluate_in_the_middle, "serial", 2)
    (_, undisturbed, _), *_ = on_ranks(size, evaluate_in_the_middle, "serial", 0)
    assert expected[0][1] == undisturbed
    assert len(set(expected[0][2])) == 6
    for schedule in SCHEDULES:
        assert on_ranks(size, evaluate_in_the_middle, schedule, 2) == expected


def save_in_the_middle(world: World, schedule: str, path) -> tuple[str, str]:
    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    batches = share_of(global_batches(8), world)

    def after_step(result) -> None:
        if trainer.num_steps == 5:
            trainer.save(path)

    trainer.fit(batches, after_step=after_step)
    second = make_trainer(world, replace(CASE, schedule=schedule))
    second.load(path)
    second.fit(batches[5:])
    return trainer.digest(), second.digest()


@pytest.mark.parametrize("schedule", OUTER)
def test_save_in_the_middle(schedule: str, tmp_path) -> None:
    for whole, continued in on_ranks(2, save_in_the_middle, schedule, tmp_path / "save"):
        assert whole == continued


@pytest.mark.parametrize("schedule", OUTER)
def test_leaving_between_commit_and_update_is_an_error(schedule: str) -> None:
    case = replace(CASE, schedule=schedule)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    reducer = nestpipe.DenseReducer(model, World())

    def leave() -> None:
        with make_pipeline(World(), case, global_batches(4)) as pipeline:
            for step in pipeline:
                for micro_batch in step:
                    (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
                reducer.finish(step)
                break

    with pytest.raises(RuntimeError, match=r"step 0 was left between commit\(\) and update_rows\(\)"):
        leave()


@pytest.mark.parametrize("schedule", OUTER)
def test_a_step_must_be_complete(schedule: str) -> None:
    def leave_early() -> None:
        with make_pipeline(World(), replace(CASE, schedule=schedule), global_batches(4)) as pipeline:
            for step in pipeline:
                for _ in step:
                    break
                step.update_rows()

    def forget() -> None:
        with make_pipeline(World(), replace(CASE, schedule=schedule), global_batches(4)) as pipeline:
            for step in pipeline:
                list(step)

    with pytest.raises(RuntimeError, match="step 0: only 0 of 2 micro-batches were gone through"):
        leave_early()
    with pytest.raises(RuntimeError, match=r"step 0 was left without update_rows\(\)"):
        forget()


def test_stale_rows_need_an_overlap() -> None:
    with pytest.raises(ValueError, match="stale rows need one of the schedules inter"):
        nestpipe.pipeline(features_of(CASE), [], schedule="intra", stale=True)


def owned_keys(batch: Batch) -> set[int]:
    return {*batch.keys["items"].values.tolist(), *batch.keys["tags"].values.tolist()} - {-7}


@pytest.mark.parametrize("schedule", OUTER)
def test_host_traffic(schedule: str) -> None:
    """Each row that a batch needs is retrieved and written back once; with room for all, each row is read once.

    Fails if RowPool.retrieve counts hits, or if the pool writes a row that nothing has changed.
    """
    batches, record_bytes = global_batches(6), 15 * 8
    room = 60 * record_bytes if schedule in OVERLAPPING else None
    trainer = make_trainer(World(), replace(CASE, schedule=schedule), resident_bytes=room)
    times, seen = trainer.fit(batches).times, set()
    for batch, step in zip(batches, times, strict=True):
        keys = owned_keys(batch)
        missing = keys if room is None else keys - seen
        assert step.sizes["retrieved_bytes_per_step"] == len(missing) * record_bytes
        assert step.sizes["written_back_bytes_per_step"] == (len(keys) * record_bytes if room is None else 0)
        assert (step.sizes["owned_keys_per_step"], step.sizes["retrieved_keys_per_step"]) == (len(keys), len(missing))
        seen |= keys
        if room is not None:  # the next batch may be resident already
            assert len(seen) <= step.sizes["resident_rows"] <= 60
            assert step.sizes["resident_bytes"] <= room
    assert torch.is_grad_enabled()


def test_host_traffic_of_few_slots() -> None:
    """Keys of the overlap are neither retrieved nor written back; all others are, once each."""
    keys = [range(0, 20), range(10, 30), range(20, 40), range(30, 50), range(40, 60)]
    batches = [Batch({"item": Jagged.one_each(torch.tensor(list(k)))}, weight=20.0) for k in keys]
    table = Table("item", 4, optimizer=nestpipe.optim.SGD(0.1))
    trace = Trace([])
    options = {"schedule": "inter", "resident_bytes": 30 * 16, "trace": trace}
    with nestpipe.pipeline({"item": Pooled(table)}, batches, **options) as steps:
        for step in steps:
            for micro_batch in step:
                micro_batch.embeddings["item"].sum().backward()
            step.update_rows()
    retrieved = [step.sizes["retrieved_keys_per_step"] for step in trace.steps[:5]]
    written = [step.sizes["written_back_bytes_per_step"] for step in trace.steps[:5]]
    assert retrieved == [20, 10, 10, 10, 10]
    assert written == [0, 0, 160, 160, 160]  # to make room for the batch
