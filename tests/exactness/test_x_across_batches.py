"""X1 to X5: exchange across the batch boundary gives the bits of serial, whatever happens at the boundary.

Batches share none, some or all of their keys, and between two steps there are flushes, saves, stops, errors and steps
that are not finite. Fails if a row of both batches is sent early (`early[:] = True` in crossing._owned_marks), if a
gradient is deferred that the next batch needs (`late[:] = True` there), if slots are given up whose late update is to
come (`range(number - 1, number)` in Stages._in_flight_before), if it has the later step's settings (return `self` in
RowUpdate.kept), if a flush leaves it out (return at once in Stages.complete_updates), or if the error of another rank
is ignored (`if error is not None:` in crossing.compare).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from nestpipe import Batch, Trainer, World
from nestpipe.distributed import RankError
from nestpipe.embedding import crossing
from nestpipe.embedding.plan import WINDOWS
from nestpipe.pipelining import NonFiniteError
from tests.exactness.cases import Case, make_trainer, on_ranks
from tests.exactness.test_e1_bit_identical import keys_batch
from tests.exactness.test_r06_capacity import owned

NUM_KEYS, NUM_BATCHES = 30, 6
SHARED = {"none": 0, "some": 12, "most": 25, "all": 30}
"""Keys that consecutive batches share."""


def stream(shared: str) -> list[torch.Tensor]:
    """Returns batches that move along the numbers, and so share keys with their neighbours."""
    distance = NUM_KEYS - SHARED[shared]
    return [torch.arange(NUM_KEYS) + distance * number for number in range(NUM_BATCHES)]


def batches_of(shared: str, world: World) -> list[Batch]:
    return [keys_batch(keys[world.rank :: world.size].contiguous()) for keys in stream(shared)]


def trainer_of(world: World, case: Case, **options: object) -> Trainer:
    trainer = make_trainer(world, case, **options)
    trainer.check_split = False
    return trainer


def capacity_of(shared: str, world: World) -> int:
    """Returns the bytes of the fewest slots for three batches."""
    sets = [owned(keys, world) for keys in stream(shared)]
    return max(len(set.union(*sets[i : i + 3])) for i in range(len(sets))) * 3 * 5 * 8


Run = tuple[str, int, str, bool]
"""Keys shared, number of micro-batches, window, and whether the pool has as few slots as possible."""
OPTIMIZERS = ("adam", "adagrad", "sgd", "rowwise_adagrad")


def compared(world: World, runs: list[Run]) -> list[tuple[Run, bool]]:
    results = []
    for number, run in enumerate(runs):
        shared, num_micro_batches, window, is_smallest = run
        case = Case(OPTIMIZERS[number % 4] if not is_smallest else "adam", "shared", num_micro_batches, window)
        capacity = {"resident_bytes": capacity_of(shared, world)} if is_smallest else {}
        digests = []
        for trainer in (trainer_of(world, case), trainer_of(world, replace(case, schedule="nested"), **capacity)):
            trainer.fit(batches_of(shared, world))
            digests.append(trainer.digest())
        results.append((run, digests[0] == digests[1]))
    return results


ALL = list(product(SHARED, (1, 2, 4, 8), WINDOWS, (False, True)))


@pytest.mark.parametrize(
    ("size", "runs"),
    [
        (2, ALL[::5]),
        pytest.param(3, ALL[1::5], id="3-pairs"),
        *(pytest.param(size, ALL, id=f"{size}-all", marks=pytest.mark.slow) for size in (2, 3, 4)),
    ],
)
def test_every_overlap(size: int, runs: list[Run]) -> None:
    """X4. The pool has room for three batches at the least."""
    for results in on_ranks(size, compared, runs):
        assert [run for run, is_equal in results if not is_equal] == []


# ---- what happens at a boundary: each function trains all batches, with an event at one of them ----

Event = Callable[[Trainer, list[Batch], int, Path], list[str]]


def flushed(trainer: Trainer, batches: list[Batch], at: int, folder: Path) -> list[str]:
    """Takes a digest in the middle of a run, as an evaluation does."""
    digests: list[str] = []
    trainer.fit(batches, after_step=lambda _: digests.append(trainer.digest()) if trainer.num_steps == at else None)
    return digests


def saved(trainer: Trainer, batches: list[Batch], at: int, folder: Path) -> list[str]:
    """Saves in the middle of a run, and goes on from there with another trainer."""
    path = folder / f"{trainer.options.schedule}-{at}"

    def save(_: object) -> None:
        if trainer.num_steps == at:
            trainer.save(path)

    trainer.fit(batches, after_step=save)
    case = Case("adam", "shared", 2, schedule=trainer.options.schedule)
    other = trainer_of(trainer.world, case)
    other.load(path)
    digests = [other.digest()]
    other.fit(batches[at:])
    return [*digests, other.digest()]


def stopped(trainer: Trainer, batches: list[Batch], at: int, folder: Path) -> list[str]:
    trainer.fit(batches, steps=at)
    return [trainer.digest(), *_continued(trainer, batches[at:])]


def refused(trainer: Trainer, batches: list[Batch], at: int, folder: Path) -> list[str]:
    """One rank cannot read its batch: all raise when its turn comes."""
    world = trainer.world

    def read() -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            if number == at and world.rank == world.size - 1:
                raise LookupError("no such file")
            yield batch

    with pytest.raises((LookupError, RankError), match="no such file"):
        trainer.fit(read())
    assert trainer.num_steps == at
    return [trainer.digest(), *_continued(trainer, batches[at + 1 :])]


def non_finite(trainer: Trainer, batches: list[Batch], at: int, folder: Path) -> list[str]:
    """X3. The gradient of one rank is not finite: no row of the step changes, those of the step before all do."""
    world, bad = trainer.world, list(batches)
    if world.rank == world.size - 1:
        bad[at] = replace(bad[at], inputs={"label": bad[at].inputs["label"] * torch.nan})
    with pytest.raises(NonFiniteError):
        trainer.fit(bad)
    assert trainer.num_steps == at
    return [trainer.digest(), *_continued(trainer, batches[at + 1 :])]


def with_other_settings(trainer: Trainer, batches: list[Batch], at: int, folder: Path) -> list[str]:
    """The user changes the row optimizer between two steps: that holds for the later one only."""

    def change(_: object) -> None:
        if trainer.num_steps == at:
            for table in trainer.tables:
                table.optimizer.lr, table.optimizer.weight_decay = 7.0, 0.5

    trainer.fit(batches, after_step=change)
    return []


def without_samples(trainer: Trainer, batches: list[Batch], at: int, folder: Path) -> list[str]:
    """A batch is no step: late gradients of the batch before it are applied in its place."""
    none = keys_batch(torch.empty(0, dtype=torch.int64))
    trainer.fit([*batches[:at], none, *batches[at:]])
    assert trainer.num_skipped == 1
    return []


def failed_on_one_rank(trainer: Trainer, batches: list[Batch], at: int, folder: Path) -> list[str]:
    """The last rank cannot find out what crosses the boundary: all ranks raise at the same batch, and go on."""
    is_nested, number = trainer.options.schedule == "nested", 0
    owned_marks = crossing._owned_marks

    def fails(*arguments):
        nonlocal number
        number += 1
        if number == at and trainer.world.rank == trainer.world.size - 1:
            raise MemoryError("no memory for this test")
        return owned_marks(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossing, "_owned_marks", fails)
        if is_nested:
            with pytest.raises((MemoryError, RankError), match="no memory for this test"):
                trainer.fit(batches)
        else:
            trainer.fit(batches, steps=at)
    assert trainer.num_steps == at
    return [trainer.digest(), *_continued(trainer, batches[at:])]


def _continued(trainer: Trainer, batches: list[Batch]) -> list[str]:
    trainer.fit(batches)
    return []


EVENTS: dict[str, Event] = {
    "flush": flushed,
    "save": saved,
    "stop": stopped,
    "error": refused,
    "non-finite": non_finite,
    "no step": without_samples,
    "settings": with_other_settings,
    "all fail": failed_on_one_rank,
}


def interrupted(world: World, event: str, folder: Path) -> list[tuple[int, bool]]:
    results = []
    for at in range(1, NUM_BATCHES - 1):
        case = Case("rowwise_adagrad" if event == "settings" else "adam", "shared", 2)
        digests = []
        for schedule in ("serial", "nested"):
            trainer = trainer_of(world, replace(case, schedule=schedule))
            seen = EVENTS[event](trainer, batches_of("some", world), at, folder)
            digests.append([*seen, trainer.digest(), str(trainer.num_steps)])
        results.append((at, digests[0] == digests[1]))
    return results


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_event_at_every_step(size: int, event: str, tmp_path: Path) -> None:
    """X5. Late gradients are applied before the event, on all ranks."""
    for results in on_ranks(size, interrupted, event, tmp_path):
        assert [at for at, is_equal in results if not is_equal] == []
