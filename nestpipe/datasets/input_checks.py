"""Input while it is read: it stays as it was found, and gzip data are whole."""

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from nestpipe.datasets.text_files import is_gzip

_READ_BYTES, _UNPACKED_BYTES = 1 << 16, 1 << 20
_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class Stamp:
    """What changes when a file does."""

    num_bytes: int
    mtime_ns: int
    inode: int


def stamp(file: Path) -> Stamp:
    stat = file.stat()
    return Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def check_unchanged(file: Path, found: Stamp) -> None:
    try:
        is_same = stamp(file) == found
    except FileNotFoundError:
        is_same = False
    if not is_same:
        raise ValueError(f"{file} has changed or gone since it was found; prepare it again once it stays as it is")


@contextmanager
def checked(file: Path, found: Stamp) -> Iterator[None]:
    """While the file is read, and in the end."""
    stop = Event()
    with ThreadPoolExecutor(1) as executor:
        checking = executor.submit(gzip_problem, file, stop)
        try:
            yield
            problem = checking.result()
        finally:
            stop.set()
    check_unchanged(file, found)
    if problem is not None:
        raise ValueError(f"{file}: {problem}; get the file again")


def gzip_problem(file: Path, stop: Event | None = None) -> str | None:
    """The engine checks neither sums nor sizes. None if all is well, or if told to stop."""
    if not is_gzip(file):
        return None
    member, is_begun = zlib.decompressobj(_GZIP), False
    try:
        with file.open("rb") as raw:
            while block := raw.read(_READ_BYTES):
                if stop is not None and stop.is_set():
                    return None
                while block:
                    member.decompress(block, _UNPACKED_BYTES)
                    block, is_begun = member.unused_data if member.eof else member.unconsumed_tail, not member.eof
                    if member.eof:
                        member = zlib.decompressobj(_GZIP)
            while is_begun and member.decompress(b"", _UNPACKED_BYTES):
                pass
    except zlib.error as error:
        is_other = "incorrect header check" in str(error)
        return "bytes that are no gzip data follow its last line" if is_other else f"the gzip file is damaged: {error}"
    return "the gzip file ends in the middle, it is incomplete" if is_begun and not member.eof else None
