"""R5 and R8: a flush in the middle of a run writes every row with the step that changed it, and evicts none.

Fails if GroupPool.flush forgets the slots that it has written (`self.index.evict`), if Stages.flush does not settle the
step before it, or if records are written with the number of the last step (`dirty.steps.fill_(...)`).
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from nestpipe import Batch, Trainer, World
from nestpipe.pipelining.schedule import OVERLAPPING
from nestpipe.train.fit_result import FitResult
from tests.exactness.cases import Case, make_trainer, on_ranks
from tests.exactness.test_r06_capacity import STREAMS, batches_of, resident_bytes

CASE = Case("adam", "shared", 2)
SOME = ("period_3", "thrash", "returning", "random")


def flushed(world: World, schedule: str, capacity: str) -> None:
    for stream in SOME:
        num_bytes = resident_bytes(stream, capacity, world, schedule)
        trainer = make_trainer(world, replace(CASE, schedule=schedule), resident_bytes=num_bytes)
        check_flushes(trainer, make_trainer(world, CASE), batches_of(stream, world))


def check_flushes(trainer: Trainer, expected: Trainer, batches: list[Batch]) -> None:
    """Compares the store after every second step with that of serial, row by row with its step."""
    trainer.check_split = expected.check_split = False
    checked = []

    def check(result: FitResult) -> None:
        if trainer.num_steps % 2 == 0:
            return
        assert trainer.pool is not None
        num_rows = trainer.pool.num_rows
        trainer.flush()
        assert trainer.pool.num_rows >= num_rows  # lanes may have retrieved the next batch meanwhile
        expected.fit(batches[expected.num_steps : trainer.num_steps])
        pieces = [t.store.export_piece("item", 0, 65536) for t in (trainer, expected)]
        for name in ("keys", "records", "steps"):
            assert torch.equal(getattr(pieces[0], name), getattr(pieces[1], name)), trainer.num_steps
        checked.append(trainer.num_steps)

    trainer.fit(batches, after_step=check)
    assert len(checked) > 1


@pytest.mark.parametrize("capacity", ["minimum", "everything"])
@pytest.mark.parametrize(("size", "schedule"), [(1, "inter"), (2, "nested")])
def test_a_flush_in_the_middle(size: int, schedule: str, capacity: str) -> None:
    assert schedule in OVERLAPPING
    on_ranks(size, flushed, schedule, capacity)


def test_rows_stay_resident_between_two_fits() -> None:
    """With room for everything the second pass reads and writes nothing. Fails if the end of fit empties the pool."""
    case = Case("adam", "shared", 1, schedule="inter")
    trainer = make_trainer(World(), case, resident_bytes=resident_bytes("random", "everything", World(), "inter"))
    trainer.check_split = False
    batches = batches_of("random", World())
    trainer.fit(batches)
    times = trainer.fit(batches).times
    fields = ("retrieved_bytes_per_step", "written_back_bytes_per_step")
    assert [step.sizes[field] for step in times for field in fields] == [0] * 2 * len(batches)
    assert len(list(pairwise(times))) == len(STREAMS["random"]) - 1
