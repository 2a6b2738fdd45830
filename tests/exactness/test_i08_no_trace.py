"""I8: a batch that was routed and retrieved but never trained leaves no trace in the store.

Fails if retrieve_rows scatters the initial records of missing keys, or if Pipeline trains one step too many.
"""

from dataclasses import replace

import pytest

from nestpipe import World
from nestpipe.train.digest import digest
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
from tests.schedules import OUTER

CASE = Case("adam", "shared", 2, steps=6)


def leave_in_a_step(world: World, schedule: str, when: str) -> tuple[str, str, int]:
    """Returns the digests of the rows after leaving step 3 before it was applied, and after three steps."""
    case = replace(CASE, schedule=schedule)
    model = SmallModel({name: feature.table.dim for name, feature in features_of(case).items()})
    batches = share_of(global_batches(CASE.steps), world)

    def run(batches, last: int):
        with make_pipeline(world, case, batches) as pipeline:
            for step in pipeline:
                for i, micro_batch in enumerate(step):
                    if step.number == last and (when == "at once" or i == 1):
                        break
                    (model(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
                if step.number == last:
                    break
                step.update_rows()
        tables = [feature.table for feature in features_of(case).values()]
        return digest(tables[:1], pipeline.store, last, world)

    return run(batches, 3), run(batches[:3], 3)


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("when", ["at once", "in the middle"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_is_left(schedule: str, when: str, size: int) -> None:
    for left, expected in on_ranks(size, leave_in_a_step, schedule, when):
        assert left == expected


def stop_after(world: World, schedule: str, steps: int) -> tuple[str, str]:
    """Returns the digests of a run that is told to stop after `steps`, and of one whose data ends there."""
    batches = share_of(global_batches(CASE.steps), world)
    told, short = (make_trainer(world, replace(CASE, schedule=schedule)) for _ in range(2))
    told.fit(batches, steps=steps)
    short.fit(batches[:steps])
    return told.digest(), short.digest()


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_batches_beyond_the_last_step(schedule: str, steps: int) -> None:
    for told, short in on_ranks(2, stop_after, schedule, steps):
        assert told == short


def pulled(schedule: str, steps: int) -> int:
    """Returns the number of batches that were pulled from the reader."""
    taken = 0

    def reader():
        nonlocal taken
        for batch in global_batches(CASE.steps):
            taken += 1
            yield batch

    trainer = make_trainer(World(), replace(CASE, schedule=schedule))
    trainer.check_split = False
    trainer.fit(reader(), steps=steps)
    return taken


@pytest.mark.parametrize("schedule", OUTER)
def test_no_batch_is_pulled_beyond_the_last_step(schedule: str) -> None:
    assert [pulled(schedule, steps) for steps in (1, 3)] == [1, 3]
