"""One live process holds the lock of a folder of checkpoints. A dead one holds nothing.

Fails, for example, if FolderLock._take asks for a shared lock, if it does not write who holds it, or if a fork keeps
its copy of the file open.
"""

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from nestpipe.checkpoint.folder import LOCK, CheckpointError
from nestpipe.checkpoint.lock import FolderLock

FORK = multiprocessing.get_context("fork")


def hold(folder: Path, told: Connection) -> None:
    with FolderLock(folder):
        told.send(os.getpid())
        time.sleep(60)


def holder_of(folder: Path) -> tuple[multiprocessing.process.BaseProcess, int]:
    """Returns another process that holds the lock."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=hold, args=(folder, there))
    process.start()
    assert here.poll(20)
    return process, here.recv()


def test_another_live_process(tmp_path: Path) -> None:
    """Names folder, host, process and time. The lock is free as soon as its holder is dead, even by SIGKILL."""
    process, number = holder_of(tmp_path)
    try:
        expected = re.escape(f"{tmp_path} is locked by process {number} on host {socket.gethostname()}, since ")
        time_of = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
        with pytest.raises(
            CheckpointError, match=f"{expected}{time_of}.* give this run a checkpoint folder of its own"
        ):
            FolderLock(tmp_path)
    finally:
        os.kill(number, signal.SIGKILL)
        process.join()
    with FolderLock(tmp_path):
        pass
    assert (tmp_path / LOCK).exists()


def test_two_locks_of_this_process(tmp_path: Path) -> None:
    """Fails if FolderLock.release closes no file."""
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    with FolderLock(first), FolderLock(other):
        for path in (first, first / ".." / "first"):
            with pytest.raises(CheckpointError, match=f"is locked by process {os.getpid()} on host"):
                FolderLock(path)
    lock = FolderLock(first)
    lock.release()
    lock.release()
    FolderLock(first).release()


def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A reader's worker, for example, may outlive the process that was killed. Fails without _release_in_child."""
    lock = FolderLock(tmp_path)
    worker = FORK.Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        with pytest.raises(CheckpointError):  # the fork has not given it back, either
            FolderLock(tmp_path)
        time.sleep(0.2)
        lock.release()
        FolderLock(tmp_path).release()
    finally:
        worker.kill()
        worker.join()


def test_a_holder_that_has_not_written_its_name(tmp_path: Path) -> None:
    """Fails if FolderLock._refused does not expect an empty file."""
    with (tmp_path / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="is locked by another process, which has not written its name yet"):
            FolderLock(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes on with a warning. Two locks of this process are still refused. Fails if ENOLCK is raised."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="cannot be locked: .*only one run writes checkpoints to"):
        lock = FolderLock(tmp_path)
    with pytest.raises(CheckpointError, match=f"locked by process {os.getpid()}"):
        FolderLock(tmp_path)
    lock.release()


def test_a_full_disk(tmp_path: Path) -> None:
    """Names the file, and leaves no lock behind. Fails if _take lets os.pwrite's own error pass."""
    (tmp_path / LOCK).symlink_to("/dev/full")
    for _ in range(2):
        with pytest.raises(OSError, match=f"no space left on the disk: '{tmp_path / LOCK}'") as caught:
            FolderLock(tmp_path)
        assert caught.value.errno == errno.ENOSPC


def test_a_folder_that_cannot_be_written() -> None:
    """Names the file. No user may create one in /sys, not even root."""
    with pytest.raises(OSError, match=LOCK) as caught:
        FolderLock(Path("/sys/kernel"))
    assert caught.value.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
