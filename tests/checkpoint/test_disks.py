"""Disks that fail during a save: an error on every rank, the last good checkpoint untouched, training goes on.

A test mounts small file systems for its own processes only. That needs root, as in the CI.
"""

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nestpipe import World
from nestpipe.checkpoint import CheckpointError
from nestpipe.checkpoint.shards import ShardFile
from tests.clicks import batches, make_trainer
from tests.ranks import run_ranks

_CLONE_NEWNS, _MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x20000, 1, 32, 16384, 1 << 18
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount; CI runs as root")


def mount(path: Path, options: str, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.mount(b"none", str(path).encode(), b"tmpfs", flags, options.encode())
    assert result == 0, os.strerror(ctypes.get_errno())


def own_mounts() -> None:
    """Makes mounts of this process invisible to others. Its threads started before keep the old ones."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0


def fill_disk(path: Path) -> None:
    with (path / "fill").open("wb") as file:
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_bsize
        file.write(bytes(max(0, free - 20_000)))


def make_read_only(path: Path) -> None:
    mount(path, "", _MS_REMOUNT | _MS_RDONLY)


def make_usable(path: Path) -> None:
    mount(path, "size=64m", _MS_REMOUNT)
    (path / "fill").unlink(missing_ok=True)


def save_on_a_bad_disk(world: World, path: Path, spoil: Callable[[Path], None]) -> tuple[str, bool, bool]:
    """Returns the error, whether the old checkpoint still loads, and whether a later save is good."""
    own_mounts()
    mount(path, "size=64m")
    trainer, data = make_trainer(world), batches(world)
    trainer.fit(data, 2)
    trainer.save(path / "save")
    old = trainer.digest()
    trainer.fit(data, 2)
    spoil(path)
    try:
        trainer.save(path / "save")
        message = ""
    except CheckpointError as error:
        message = str(error)
    again = make_trainer(world)
    again.load(path / "save")
    is_old_good = again.digest() == old
    trainer.fit(data, 2)
    make_usable(path)
    trainer.save(path / "save")
    again.load(path / "save")
    return message, is_old_good, again.digest() == trainer.digest()


@needs_root
@pytest.mark.parametrize(("spoil", "text"), [(fill_disk, "no space left on the disk"), (make_read_only, "Read-only")])
def test_a_full_and_a_read_only_disk(spoil, text: str, tmp_path: Path) -> None:
    """Fails if Save._give_up does not discard what was written, or if the next save is based on the failed one."""
    ((message, is_old_good, is_later_good),) = run_ranks(1, save_on_a_bad_disk, tmp_path, spoil)
    assert f"saving to {tmp_path}/save failed: rank 0: " in message
    assert text in message
    assert is_old_good
    assert is_later_good


def save_while_the_folder_vanishes(world: World, path: Path) -> tuple[str, int]:
    """Returns the error when rank 0 loses its folder after the first shard of the last rank."""
    trainer, data = make_trainer(world), batches(world)
    trainer.fit(data, 2)
    finish = ShardFile.finish

    def finish_and_remove(shard: ShardFile) -> object:
        content = finish(shard)
        if world.rank == world.size - 1:
            shutil.rmtree(path, ignore_errors=True)
        return content

    ShardFile.finish = finish_and_remove  # type: ignore[method-assign, assignment]
    try:
        trainer.save(path)
        message = ""
    except CheckpointError as error:
        message = str(error)
    trainer.fit(data, 2)
    return message, trainer.num_steps


@pytest.mark.parametrize("size", [1, 2])
def test_a_folder_that_vanishes(size: int, tmp_path: Path) -> None:
    """Fails if publish does not look for the files before it renames the folder."""
    for message, num_steps in run_ranks(size, save_while_the_folder_vanishes, tmp_path / "save"):
        assert f"saving to {tmp_path}/save failed: rank " in message
        assert str(tmp_path / "save" / "step-00000002.partial") in message
        assert num_steps == 4
