"""A small disk that can be filled: a tmpfs, which only root can mount."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_BYTES = 64 << 20
BALLAST = "ballast"
NAME = "nestpipe-faults"
TROUBLES = ("full", "read-only", "gone")


def can_mount() -> bool:
    return os.geteuid() == 0


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mounts a small disk on a folder. So that it is unmounted however the process ends, except by SIGKILL, the main
    thread must be in ended_by_signals()."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", NAME, str(folder))
    try:
        yield
    finally:
        while num_mounts(folder) > 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def spoil(disk: Path, trouble: str, leave_bytes: int = 0) -> None:
    """Makes trouble with a small disk: full but for some bytes, read-only, or gone."""
    if not disk.is_mount():
        raise ValueError(f"{disk} is no disk of its own, so it is left alone")
    if trouble == "full":
        _fill(disk, leave_bytes)
    elif trouble == "read-only":  # the disk itself cannot be made read-only while a file is open
        _mount("--bind", str(disk), str(disk))
        _mount("-o", "remount,bind,ro", str(disk))
    elif trouble == "gone":
        _mount("-t", "tmpfs", "-o", "ro,size=4096", NAME, str(disk))
    else:
        raise ValueError(f"trouble is {trouble!r}, must be one of {', '.join(TROUBLES)}")


def _fill(disk: Path, leave_bytes: int) -> None:
    with (disk / BALLAST).open("wb") as file:
        while True:
            status = os.statvfs(disk)
            try:
                os.posix_fallocate(file.fileno(), 0, max(status.f_bavail * status.f_frsize - leave_bytes, 1))
                return
            except OSError:  # a save has taken some of it meanwhile
                file.truncate(0)


def mend(disk: Path) -> None:
    """Ends the trouble with a small disk, if there is any."""
    while num_mounts(disk) > 1:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    (disk / BALLAST).unlink(missing_ok=True)


def num_mounts(folder: Path) -> int:
    """Returns how many disks are mounted on a folder, one over the other."""
    return sum(line.split()[4] == str(folder) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(
            f"mount {' '.join(arguments)} failed: {done.stderr.strip()}; the faults of a disk need a machine on which "
            "root may mount"
        )
