"""Plain writes and reads of the disk, cold caches, memory that is at hand, and sizes of folders."""

import mmap
import os
import time
from pathlib import Path

BUFFER_BYTES = 4 << 20
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def write_plainly(file: Path, num_bytes: int) -> float:
    """Writes a file sequentially and syncs it to disk. Returns the seconds."""
    buffer = memoryview(os.urandom(BUFFER_BYTES))
    started = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        left = num_bytes
        while left > 0:
            left -= out.write(buffer[: min(left, BUFFER_BYTES)])
        os.fsync(out.fileno())
    return time.perf_counter() - started


def read_plainly(folder: Path) -> float:
    """Reads all files of a folder sequentially. Returns the seconds."""
    buffer = bytearray(BUFFER_BYTES)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    started = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as data:
            while data.readinto(buffer):
                pass
    return time.perf_counter() - started


def drop_caches(folder: Path) -> str:
    """Has the next read of a folder come from the disk. Returns what did it."""
    os.sync()
    try:
        _DROP_CACHES.write_text("3\n")
        return "drop_caches"
    except OSError:  # only root may, and not in every container
        for file in folder.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        return "posix_fadvise"


def fetch_memory(num_bytes: int) -> float:
    """Has this machine hold free memory. Returns the seconds that it took.

    A virtual machine gives free memory back to its host within seconds. To touch it again then takes longer than to
    read as much from the disk, which says nothing about either the disk or a load.
    """
    started = time.perf_counter()
    with mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for first in range(0, num_bytes, mmap.PAGESIZE):
            memory[first] = 1
    return time.perf_counter() - started
