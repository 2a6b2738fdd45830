"""Saves that are written while training goes on: exact, incremental, and never a burden to training when they fail."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from nestpipe import Trainer, World
from nestpipe.checkpoint import CheckpointError, find_checkpoint, row_writer
from nestpipe.checkpoint.row_writer import RowWriter
from nestpipe.checkpoint.shards import ShardFile
from nestpipe.train.fit_result import FitResult
from tests.clicks import batches, make_trainer
from tests.ranks import run_ranks

STEPS, EVERY = 12, 2


class SaveEvery:
    """A callback that begins a save and does not wait for it."""

    every = EVERY

    def __init__(self, path: Path, complete_every: int = 3, keep: int = STEPS) -> None:
        self.path, self.complete_every, self.keep = path, complete_every, keep
        self.digests: dict[int, str] = {}

    def __call__(self, trainer: Trainer, result: FitResult) -> bool:
        trainer.save(self.path, wait=False, complete_every=self.complete_every, keep=self.keep)
        self.digests[trainer.num_steps] = trainer.digest()
        return False


def save_and_load_all(world: World, path: Path, schedule: str, resident: int | str) -> tuple[int, list[str]]:
    """Returns the number of checkpoints, and what is wrong with those that do not load to the digest of their moment,
    or from which training does not end as the run that saved them."""
    options = {"schedule": schedule, "resident_bytes": resident, "num_micro_batches": 2}
    row_writer.ASIDE_BYTES, row_writer.STRETCH_BYTES = 2_000, 1_000  # many pieces, and rows aside all the time
    trainer, callback = make_trainer(world, **options), SaveEvery(path)
    trainer.fit(batches(world), STEPS, callbacks=[callback])
    trainer.finish_save()
    last = trainer.digest()
    wrong = []
    checkpoints = sorted(path.glob("step-????????"))
    for checkpoint in checkpoints:
        again = make_trainer(world, **options)
        again.load(checkpoint)
        if again.digest() != callback.digests[again.num_steps]:
            wrong.append(f"{checkpoint.name} is not of its moment")
        again.fit(batches(world, position=again.num_steps * 64), STEPS - again.num_steps)
        if again.digest() != last:
            wrong.append(f"{checkpoint.name} does not lead to the same end")
    return len(checkpoints), wrong


CASES = [
    pytest.param(1, "serial", "minimum", marks=pytest.mark.slow),
    pytest.param(1, "nested", 1 << 30, marks=pytest.mark.slow),
    (2, "nested", "minimum"),
    pytest.param(2, "intra", "minimum", marks=pytest.mark.slow),
    pytest.param(2, "inter", 1 << 30, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("size", "schedule", "resident"), CASES)
def test_every_checkpoint_is_of_its_moment(size: int, schedule: str, resident: int | str, tmp_path: Path) -> None:
    """Complete and incremental ones alike. Fails if HostStore._preserve_tables does nothing, if
    Table::begin_snapshot does not clear the marks, or if RowWriter.write appends no rows that are aside."""
    for num_checkpoints, wrong in run_ranks(size, save_and_load_all, tmp_path / "save", schedule, resident):
        assert num_checkpoints == STEPS // EVERY
        assert wrong == []


def train_beside_a_slow_save(world: World, path: Path) -> tuple[int, int]:
    """Returns the steps when a slow save was begun, and when it was complete."""
    trainer, finish = make_trainer(world), ShardFile.finish
    seen: list[int] = []

    def slow(shard: ShardFile) -> object:
        time.sleep(0.1)
        return finish(shard)

    ShardFile.finish = slow  # type: ignore[method-assign, assignment]

    def after_step(result: FitResult) -> None:
        time.sleep(0.02)
        if not seen and any(path.glob("step-????????")):
            seen.append(trainer.num_steps)

    trainer.fit(batches(world), 60, after_step, callbacks=[_SaveOnce(path)])
    return _SaveOnce.every, seen[0]


class _SaveOnce:
    every = 5

    def __init__(self, path: Path) -> None:
        self.path, self.is_done = path, False

    def __call__(self, trainer: Trainer, result: FitResult) -> bool:
        if not self.is_done:
            self.is_done = True
            trainer.save(self.path, wait=False)
        return False


def test_training_goes_on_meanwhile(tmp_path: Path) -> None:
    """The checkpoint appears within fit, some steps later. Fails if Saver.begin waits, or if fit never finishes a
    save."""
    for begun, complete in run_ranks(2, train_beside_a_slow_save, tmp_path / "save"):
        assert begun < complete < 60


def fail_behind_the_steps(world: World, path: Path, goes_on: bool) -> tuple[str, int, int, list[str], bool]:
    """Returns the error, the steps, the errors that on_error got, the checkpoints, and whether the newest one is
    good. The last rank's disk is full during the second save."""
    trainer, errors, write, num_saves = make_trainer(world), [], os.writev, 0
    if goes_on:
        trainer.saver.on_error = errors.append

    class Callback(SaveEvery):
        def __call__(self, trainer: Trainer, result: FitResult) -> bool:
            nonlocal num_saves
            trainer.finish_save()  # the one before is not to fail
            num_saves += 1
            return super().__call__(trainer, result)

    def writev(file: int, parts: list[memoryview]) -> int:
        if num_saves == 2 and world.rank == world.size - 1:
            raise OSError(28, "No space left on device")
        return write(file, parts)

    os.writev = writev
    callback, message = Callback(path, keep=9), ""
    try:
        trainer.fit(batches(world), STEPS, callbacks=[callback])
        trainer.finish_save()
    except CheckpointError as error:
        message = str(error)
    trainer.finish_save()
    again = make_trainer(world)
    again.load(path)
    is_good = again.digest() == callback.digests[again.num_steps]
    names = sorted(checkpoint.name for checkpoint in path.glob("step-*"))
    return message, trainer.num_steps, len(errors), names, is_good


@pytest.mark.parametrize("size", [1, 2])
def test_a_full_disk_behind_the_steps(size: int, tmp_path: Path) -> None:
    """Fails if Save.finish does not agree, or leaves its files behind."""
    for message, num_steps, num_errors, names, is_good in run_ranks(
        size, fail_behind_the_steps, tmp_path / "stop", False
    ):
        assert f"rank {size - 1}: OSError: [Errno 28] no space left on the disk" in message
        assert EVERY * 2 <= num_steps < STEPS
        assert num_errors == 0
        assert names == [f"step-{EVERY:08d}"]
        assert is_good


def test_training_may_go_on_without_it(tmp_path: Path) -> None:
    """The next one has all rows. Fails if Saver.begin bases a save on one that has failed."""
    for message, num_steps, num_errors, names, is_good in run_ranks(
        2, fail_behind_the_steps, tmp_path / "continue", True
    ):
        assert (message, num_steps, num_errors) == ("", STEPS, 1)
        assert names == [f"step-{step:08d}" for step in range(EVERY, STEPS + 1, EVERY) if step != 2 * EVERY]
        assert is_good


def test_what_has_changed_is_known_to_one_saver_only(tmp_path: Path) -> None:
    """Two trainers on one store, and two folders of one trainer, take each other's marks: the next save is complete.
    Fails if Saver._usable_base does not compare the number of snapshots."""
    first = make_trainer(World())
    second = make_trainer(World())
    second.store = first.store
    path, change = tmp_path / "save", {"complete_every": 9, "keep": 9}
    steps: list[tuple[Trainer, Path]] = [(first, path), (first, path), (second, tmp_path / "b"), (first, path)]
    steps += [(first, tmp_path / "c"), (first, path), (first, path)]
    kinds = []
    for trainer, folder in steps:
        first.fit(batches(World(), position=64 * first.num_steps), 1)
        trainer.num_steps = first.num_steps
        trainer.save(folder, **change)
        kinds.append("base" if _has_base(folder / f"step-{first.num_steps:08d}") else "complete")
    assert kinds == ["complete", "base", "complete", "complete", "complete", "complete", "base"]
    again = make_trainer(World())
    again.load(path)
    assert again.digest() == first.digest()


def _has_base(checkpoint: Path) -> bool:
    from nestpipe.checkpoint.manifest import read_manifest

    return read_manifest(checkpoint)["base"] is not None


def test_erased_rows_stay_erased(tmp_path: Path) -> None:
    """Fails if RowWriter writes no erased keys, or if RowReader erases after it has imported."""
    trainer, path = make_trainer(World()), tmp_path / "save"
    trainer.fit(batches(World()), 2)
    trainer.save(path, complete_every=5, keep=5)
    table = trainer.tables[0].name
    keys = trainer.store.export_piece(table, 0, 65536).keys
    trainer.pool = None
    trainer.store.erase(table, keys[::2].contiguous())
    trainer.store.scatter(table, keys[:1], trainer.store.gather(table, keys[:1]).records + 1, step=2)
    trainer.save(path, complete_every=5, keep=5)
    again = make_trainer(World())
    again.load(path)
    assert again.store.size(table) == len(keys) - len(keys[::2]) + 1
    assert again.digest() == trainer.digest()


def test_bases_are_kept(tmp_path: Path) -> None:
    """Fails if remove_older removes a base of a checkpoint that it keeps."""
    trainer, path, data = make_trainer(World()), tmp_path / "save", batches(World())
    left: Callable[[], list[int]] = lambda: sorted(int(c.name[5:]) for c in path.glob("step-????????"))  # noqa: E731
    expected = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 3, 4], 5: [4, 5], 6: [4, 5, 6], 7: [4, 5, 6, 7]}
    for step, steps_left in expected.items():
        trainer.fit(data, 1)
        trainer.save(path, complete_every=3, keep=2)
        assert left() == steps_left, step
        again = make_trainer(World())
        again.load(path)
        assert again.digest() == trainer.digest()


@pytest.mark.timeout(60)
def test_the_end_of_fit_completes_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if fit does not finish the save at its end, or if Save.finish does not say that it waits."""
    write, waited = RowWriter.write, []

    def write_when_awaited(writer: RowWriter, is_awaited: Event) -> Any:
        waited.append(is_awaited.wait(50))
        return write(writer, is_awaited)

    monkeypatch.setattr(RowWriter, "write", write_when_awaited)
    world = World()
    make_trainer(world).fit(batches(world), 3, callbacks=[SaveEvery(tmp_path / "save")])
    assert waited == [True]
    assert find_checkpoint(tmp_path / "save").name == "step-00000002"
