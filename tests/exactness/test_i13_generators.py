"""I13: the library draws from no default generator; a model's dropout depends on (seed, step, rank, micro-batch) alone.

Fails if Step._micro_batch does not seed the generators, or if something in the package calls torch.rand without one.
All threads share the default generator, so a reader must not draw from it either: test_a_reader_* fails if BatchSource
does not check.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nestpipe import World
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of
from tests.schedules import OUTER

CASE = Case("adagrad", "shared", 3, steps=5)


def train_with_dropout(world: World, schedule: str, noise: bool) -> tuple[str, bool]:
    """Returns the digest, and whether Python's and numpy's generators are unchanged. noise: draws between steps."""

    def draw(step: int) -> None:
        if noise:
            torch.rand(7)

    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    trainer.check_split = False
    dense = trainer.model.dense
    trainer.model.dense = lambda parts, label: dense([F.dropout(part, 0.5) for part in parts], label)
    before = random.getstate(), np.random.get_state()[1].tolist()
    trainer.fit(share_of(global_batches(CASE.steps), world), after_step=draw)
    return trainer.digest(), before == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("size", [1, 2])
def test_dropout_depends_on_the_step_alone(schedule: str, size: int) -> None:
    quiet = on_ranks(size, train_with_dropout, "serial", False)
    noisy = on_ranks(size, train_with_dropout, schedule, True)
    assert noisy == quiet
    assert all(untouched for _, untouched in quiet)


def train_with_drawing_reader(world: World, schedule: str) -> str:
    def reader():
        for batch in share_of(global_batches(CASE.steps), world):
            if world.rank == world.size - 1:
                torch.rand(7)
            yield batch

    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    with pytest.raises(
        RuntimeError, match=r"drew from torch's default generator.*generator=torch.Generator\(\)"
    ) as error:
        trainer.fit(reader())
    return str(error.value)


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("size", [1, 2])
def test_a_reader_needs_its_own_generator(schedule: str, size: int) -> None:
    """Every rank raises, not only the one whose reader draws."""
    assert len(on_ranks(size, train_with_drawing_reader, schedule)) == size


def test_masks_differ_between_micro_batches_and_ranks() -> None:
    from nestpipe.device.generators import seed_generators

    masks = set()
    for purpose in ((3, 0, 0, 0), (3, 0, 0, 1), (3, 0, 1, 0), (3, 1, 0, 0), (4, 0, 0, 0)):
        seed_generators(torch.device("cpu"), *purpose)
        masks.add(torch.rand(8).numpy().tobytes())
    assert len(masks) == 5
