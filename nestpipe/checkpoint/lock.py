"""The lock of a folder of checkpoints: at most one live process writes there."""

import errno
import fcntl
import json
import os
import socket
import time
import warnings
from pathlib import Path
from types import TracebackType

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import LOCK, with_file_name

_WITHOUT_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)
_MOST_BYTES = 4096


class FolderLock:
    """An exclusive lock of a folder, from when it is made until `release`, the end of its context, or the end of this
    process, however it ends.

    The file DIR/nestpipe-checkpoints.lock carries the lock. It is never removed: another process may have opened it.
    """

    def __init__(self, folder: Path) -> None:
        """folder: must exist. Raises CheckpointError if it is locked, OSError if the file cannot be written."""
        self.folder = folder
        self._file = folder / LOCK
        self._descriptor: int | None = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
        status = os.fstat(self._descriptor)
        self._identity = status.st_dev, status.st_ino
        try:
            self._take(self._descriptor)
        except BaseException:
            self._close()
            raise
        _held.add(self)

    def release(self) -> None:
        """Gives the lock back, if this process still holds it."""
        _held.discard(self)
        self._close()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _take(self, descriptor: int) -> None:
        # Within this process, two writers are refused even if the file system has no locks.
        if any(lock._identity == self._identity for lock in _held):
            raise self._refused(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refused(descriptor) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise with_file_name(error, self._file) from None
            warnings.warn(
                f"{self._file} cannot be locked: {error.strerror}. See to it that only one run writes checkpoints to "
                f"{self.folder}",
                stacklevel=3,
            )
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        text = json.dumps(holder).encode() + b"\n"
        try:
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
        except OSError as error:
            raise with_file_name(error, self._file) from None

    def _refused(self, descriptor: int) -> CheckpointError:
        try:
            holder = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
            who = f"process {holder['process']} on host {holder['host']}, since {holder['since']}"
        except (ValueError, KeyError, TypeError, OSError):
            who = "another process, which has not written its name yet"
        return CheckpointError(
            f"{self.folder} is locked by {who}: it writes checkpoints there. Wait until it has ended, or end it; or "
            "give this run a checkpoint folder of its own"
        )

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: set[FolderLock] = set()


def _release_in_child() -> None:
    """Closes a fork's copies of the files: they would keep the locks alive after this process."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
