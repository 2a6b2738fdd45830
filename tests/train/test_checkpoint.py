"""Saving and loading: an exact continuation, and failures that keep the older checkpoint.

Fails, for example, if ShardFile.append_rows writes rows without their steps (zeros_like), or if Save.finish does not
let all ranks agree that they have written.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from nestpipe import World
from nestpipe.checkpoint import CheckpointError, find_checkpoint
from tests.checkpoint.saved import DENSE, OWN_FILES, SHARD, STATE, edit_manifest
from tests.exactness.cases import Case, global_batches, make_trainer, share_of
from tests.ranks import run_ranks

CASE = Case("adam", "shared", 2, steps=8)


def continue_from(world: World, path: Path) -> tuple[str, str]:
    """Returns digests of eight steps in one go, and of four, a save, a load into a new trainer, and four more."""
    batches = share_of(global_batches(CASE.steps), world)
    whole = make_trainer(world, CASE)
    whole.fit(batches)
    first = make_trainer(world, CASE)
    first.fit(batches[:2])
    first.save(path)
    first.fit(batches[2:4])
    first.save(path)  # replaces the first one
    second = make_trainer(world, CASE)
    second.load(path)
    second.fit(batches[4:])
    return whole.digest(), second.digest()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_continues_exactly(size: int, tmp_path: Path) -> None:
    path = tmp_path / "save"
    results = [continue_from(World(), path)] if size == 1 else run_ranks(size, continue_from, path)
    assert all(whole == continued for whole, continued in results)
    assert sorted(child.name for child in path.iterdir()) == [*OWN_FILES, "step-00000004"]


def failed_save(world: World, path: Path) -> tuple[str, bool]:
    """Returns the error when the disk is full as the last rank writes, and whether the old save still loads."""
    trainer = make_trainer(world, CASE)
    batches = share_of(global_batches(CASE.steps), world)
    trainer.fit(batches[:2])
    trainer.save(path)
    digest = trainer.digest()
    trainer.fit(batches[2:])
    message = ""
    original = os.writev

    def full_disk(descriptor: int, parts: Sequence[memoryview]) -> int:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name != f"rank{world.size - 1:05d}-shard001.rows":
            return original(descriptor, parts)
        if len(parts) > 1:
            raise OSError(28, "No space left on device")
        return original(descriptor, [parts[0][:40]])

    os.writev = full_disk
    try:
        trainer.save(path)
    except CheckpointError as error:
        message = str(error)
    finally:
        os.writev = original
    again = make_trainer(world, CASE)
    again.load(path)
    return message, again.digest() == digest


@pytest.mark.parametrize("size", [1, 2])
def test_full_disk_leaves_the_old_one(size: int, tmp_path: Path) -> None:
    path = tmp_path / "save"
    results = [failed_save(World(), path)] if size == 1 else run_ranks(size, failed_save, path)
    for message, old_is_good in results:
        assert f"rank {size - 1}: OSError" in message
        file = rf"{path}/step-00000008\.partial-[0-9a-f]+/rank{size - 1:05d}-shard001\.rows"
        assert re.search(f"no space left on the disk: '{file}'", message)
        assert old_is_good
    assert sorted(child.name for child in path.iterdir()) == [*OWN_FILES, "step-00000002"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = make_trainer(World(), CASE)
    with pytest.raises(CheckpointError, match=r"saving to .*file/save failed: rank 0: .*Not a directory"):
        trainer.save(tmp_path / "file" / "save")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = make_trainer(World(), CASE)
    trainer.fit(global_batches(2))
    trainer.save(tmp_path / "save")
    return find_checkpoint(tmp_path / "save")


def truncate(path: Path) -> None:
    file = path / SHARD
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (truncate, f"{SHARD} has "),
        (lambda path: (path / DENSE).write_bytes(b"something else"), f"{DENSE} is damaged"),
        (lambda path: (path / STATE).write_bytes(b"something else"), f"{STATE} is damaged"),
        (lambda path: (path / SHARD).unlink(), "No such file"),
        (lambda path: (path / "manifest.json").unlink(), "is not a complete checkpoint"),
        (lambda path: (path / "manifest.json").write_text("[1, 2]"), "is not the manifest of a checkpoint"),
        (lambda path: (path / "manifest.json").write_text('{"format"'), "JSONDecodeError"),
        (lambda path: edit_manifest(path, world_size=2, num_shards=2), "rank00001.json cannot be read: No such file"),
        (lambda path: edit_manifest(path, format=99), "format is 99 in the checkpoint"),
        (lambda path: edit_manifest(path, tables={}), "tables are [] in the checkpoint, ['item'] here"),
        (lambda path: shutil.move(path, path.with_name("other")), "there is no folder"),
    ],
)
def test_damaged_or_foreign(saved: Path, spoil, text: str) -> None:
    spoil(saved)
    trainer = make_trainer(World(), CASE)
    trainer.fit(global_batches(1))
    before = trainer.digest()
    with pytest.raises(CheckpointError) as raised:
        trainer.load(saved)
    assert text in str(raised.value)
    assert trainer.digest() == before


def save_where_nothing_can_be_written(world: World) -> tuple[str, str, int]:
    trainer = make_trainer(world, CASE)
    batches = share_of(global_batches(2), world)
    trainer.fit(batches[:1])
    try:
        trainer.save("/proc/nestpipe")  # no folder can be made there, not even by root
        raised: Exception = AssertionError("nothing was raised")
    except Exception as error:
        raised = error
    trainer.fit(batches[1:])
    return type(raised).__name__, str(raised), trainer.num_steps


@pytest.mark.parametrize("size", [1, 2])
def test_a_disk_that_cannot_be_written(size: int) -> None:
    save = save_where_nothing_can_be_written
    for name, text, num_steps in [save(World())] if size == 1 else run_ranks(size, save):
        assert name == CheckpointError.__name__
        assert "saving to /proc/nestpipe failed: rank 0: " in text
        assert num_steps == 2
