"""A folder of checkpoints: foreign files are never touched, and a complete checkpoint is visible at every moment.

Fails, for example, if claim does not look for a marker, if remove_older is called before publish, or if
Save._make_staging does not compare steps.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest

from nestpipe import World
from nestpipe.checkpoint import CheckpointError, find_checkpoint, folder, newest_checkpoint
from nestpipe.train.trainer import Trainer
from tests.checkpoint.saved import DENSE, SHARD
from tests.exactness.cases import Case, global_batches, make_trainer

CASE = Case("adam", "shared", 1)
MARKER, LOCK = folder.MARKER, folder.LOCK


def trained(steps: int) -> Trainer:
    trainer = make_trainer(World(), CASE)
    trainer.fit(global_batches(steps))
    return trainer


def content(path: Path) -> dict[str, bytes]:
    """Returns the content of each file but the lock, which says since when it is held."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != LOCK]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("name", ["thesis.txt", "manifest.json", "step-00000001/notes.txt", "best/rank0.pt"])
def test_a_folder_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    """Version 0.1 deleted its content."""
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="is not empty and is not a folder of checkpoints: it holds"):
        trained(1).save(tmp_path / "out")
    assert content(tmp_path) == {f"out/{name}": b"{}"}


def test_what_a_user_puts_there_stays(tmp_path: Path) -> None:
    """Files stay in the folder, in a checkpoint and in a partial one. The best model may be in the folder, too."""
    trainer = trained(1)
    trainer.save(tmp_path)
    trainer.save(tmp_path / "best")
    notes = [tmp_path / name / "notes.txt" for name in (".", "step-00000001", "step-00000009.partial")]
    notes[-1].parent.mkdir()
    for file in notes:
        file.write_text("mine")
    trainer.fit(global_batches(1))
    trainer.save(tmp_path)
    assert all(file.read_text() == "mine" for file in notes)
    assert find_checkpoint(tmp_path) == tmp_path / "step-00000002"
    assert find_checkpoint(tmp_path / "best") == tmp_path / "best" / "step-00000001"
    assert set(content(tmp_path / "step-00000001")) == {"notes.txt"}


def test_the_best_may_come_first(tmp_path: Path) -> None:
    trainer = trained(1)
    trainer.save(tmp_path / "best")
    trainer.save(tmp_path)
    assert {child.name for child in tmp_path.iterdir()} == {MARKER, LOCK, "best", "step-00000001"}


def test_more_steps_are_not_replaced(tmp_path: Path) -> None:
    longer, shorter = trained(3), trained(2)
    longer.save(tmp_path)
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint of 3 steps, this trainer is at step 2"):
        shorter.save(tmp_path)
    assert content(tmp_path) == before
    shorter.save(tmp_path, replaces_newer=True)
    assert {child.name for child in tmp_path.iterdir()} == {MARKER, LOCK, "step-00000002"}


def test_the_same_step_again(tmp_path: Path) -> None:
    trainer = trained(1)
    for _ in range(3):
        trainer.save(tmp_path)
    (checkpoint,) = folder.checkpoints(tmp_path)
    again = make_trainer(World(), CASE)
    again.load(tmp_path)
    assert again.digest() == trainer.digest()
    assert find_checkpoint(tmp_path) == checkpoint


CALLS = ("os.fsync", "os.rename", "os.replace", "os.unlink", "os.rmdir", "os.mkdir", "os.open", "os.writev")


def die_at(number: int, calls: tuple[str, ...], trainer: Trainer, path: Path, **options: int) -> None:
    """Saves, and kills the process just before the number-th of these calls, which change the disk or sync it.

    It runs in a forked process, which must not compute because it lacks torch's threads.
    """
    left = number
    originals = {name: getattr(os, name.removeprefix("os.")) for name in calls}

    def counting(name: str):
        def call(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return originals[name](*arguments, **options)

        return call

    for name in calls:
        setattr(os, name.removeprefix("os."), counting(name))
    trainer.save(path, **options)


@pytest.mark.parametrize("has_old", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_at_any_moment(has_old: bool, tmp_path: Path) -> None:
    """Killed before any call that changes the folder, the old or the new checkpoint loads, and a save works again.

    Fails if publish removes older ones first, or if _foreign refuses a marker that was only half written.
    """
    old, new = trained(1), trained(2)
    digests = {1: old.digest(), 2: new.digest()}
    endings = set()
    for number in range(100):
        path = tmp_path / str(number)
        if has_old:
            old.save(path)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                die_at(number, CALLS if has_old else CALLS[:-2], new, path)
                code = 0
            finally:
                os._exit(code)
        was_killed = os.waitpid(child, 0)[1] != 0
        survivor = make_trainer(World(), CASE)
        if folder.checkpoints(path):
            survivor.load(path)
            assert survivor.digest() == digests[survivor.num_steps]
        endings.add(survivor.num_steps)
        survivor.fit(global_batches(3 - survivor.num_steps))
        survivor.save(path)
        assert {child.name for child in path.iterdir()} == {MARKER, LOCK, "step-00000003"}
        if not was_killed:
            break
    assert number > 8
    assert endings == ({1, 2} if has_old else {0, 2})


def test_on_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ShardFile.finish, write_state or publish does not sync, or if a new folder's parent is not synced."""
    trainer, calls = trained(1), []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        calls.append(f"-> {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    trainer.save(tmp_path / "a" / "b")
    calls = [name.partition("partial-")[0] for name in calls]  # a random number follows
    assert calls == [
        *(f"{MARKER}.new", "b", "a", tmp_path.name),
        *(f"rank00000-shard00{shard}.rows" for shard in range(4)),
        *("dense.safetensors", "rank00000.safetensors", "rank00000.json.new", "manifest.json.new"),
        "step-00000001.",
        *("-> step-00000001", "b"),
    ]


def test_names_that_a_user_may_choose(tmp_path: Path) -> None:
    """Files, folders, copies and links that a user made are not taken for checkpoints, and do not disturb a save."""
    path, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    trainer = trained(2)
    trainer.save(path)
    trained(1).save(elsewhere)
    (path / "step-00000001").symlink_to(elsewhere / "step-00000001")
    (path / "step-100").write_text("mine")
    (path / "step-200").mkdir()
    (path / "step-200" / "dense.pt").write_text("mine")
    (path / "step-00000300").mkdir()
    (path / "step-00000300" / "rank0.pt").write_text("mine")
    (path / "step-00000003.partial").mkdir()
    (path / "step-00000003.partial" / ".nfs0001").write_text("of the file system")
    shutil.copytree(path / "step-00000002", path / "step-00000002.1")
    before = content(path)
    for _ in range(2):
        trainer.fit(global_batches(1))
        trainer.save(path)
        after = content(path)
        kept = [name for name in before if not name.startswith("step-00000002/")]
        assert [name for name in kept if after.get(name) != before[name]] == []
    assert find_checkpoint(path) == path / "step-00000004"
    assert content(elsewhere)["step-00000001/manifest.json"]


def test_what_a_folder_holds(tmp_path: Path) -> None:
    """The best model of one run must not replace another run's checkpoints, nor the other way round."""
    trainer = trained(1)
    folder.claim(tmp_path / "run", folder.RUN)
    folder.claim(tmp_path / "best", folder.BEST)
    for name in ("run", "best", "program"):
        trainer.save(tmp_path / name)
    for name, holds in (("run", folder.BEST), ("best", folder.RUN), ("program", folder.BEST), ("program", folder.RUN)):
        with pytest.raises(CheckpointError, match=f"is to hold {holds}, but it holds"):
            folder.claim(tmp_path / name, holds)
    folder.claim(tmp_path / "run", folder.RUN)
    folder.claim(tmp_path / "best", folder.BEST)


def test_a_checkpoint_of_01_next_to_a_newer_one(tmp_path: Path) -> None:
    """A run may be killed after its first new checkpoint, before the old one is removed.

    Fails if find_checkpoint looks for a manifest first.
    """
    trained(2).save(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 1, "checksums": {}, "num_steps": 1}')
    assert find_checkpoint(tmp_path) == newest_checkpoint(tmp_path)[0] == tmp_path / "step-00000002"


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    trained(1).save(tmp_path)
    newer = tmp_path / "step-00000002"
    trained(2).save(tmp_path / "other")
    (tmp_path / "other" / newer.name).rename(newer)
    file = newer / SHARD
    file.write_bytes(file.read_bytes()[:-1])
    newest, problems = newest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-00000001"
    assert len(problems) == 1
    assert f"{SHARD} has" in problems[0]
    (tmp_path / "step-00000001" / DENSE).unlink()
    with pytest.raises(CheckpointError, match=rf"every checkpoint .* is damaged: .*{SHARD} has.*{DENSE} is missing"):
        newest_checkpoint(tmp_path)


def test_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for number in (1, 2):
        trained(number).save(path)
        (path / "notes.txt").write_text(str(number))
        assert folder.move_away(path) == tmp_path / f"out.{number}"
        assert not path.exists()
        assert (tmp_path / f"out.{number}" / "notes.txt").read_text() == str(number)
    assert folder.move_away(path) is None
    path.mkdir()
    (path / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not a folder of checkpoints"):
        folder.move_away(path)
