"""Published files as input: found, plain or gzip; unchanged while they are read; gzip data complete."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NamedTuple

from nestpipe.datasets.text_files import is_gzip

_READ_BYTES, _UNPACKED_BYTES = 1 << 16, 1 << 20
_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class Stamp:
    """Properties of a file that change when the file does."""

    num_bytes: int
    mtime_ns: int
    inode: int


def stamp(file: Path) -> Stamp:
    stat = file.stat()
    return Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ino)


class VariantFiles(NamedTuple):
    variant: str
    stamps: dict[Path, Stamp]
    """The files in their order, with their stamps before any of them was read."""


def find_variant(
    source: Path, variants: Mapping[str, Sequence[str]], folders: Mapping[str, Sequence[str]]
) -> VariantFiles:
    """Returns the one variant whose files are in `source`, or in one of its `folders` below it."""
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give the one with the published files")
    places = {}
    for variant, names in variants.items():
        for folder in folders[variant]:
            files = {name: file for name in names if (file := _plain_or_gzip(source / folder, name)) is not None}
            if files:
                places[variant] = source / folder, files
                break
    if not places:
        wanted = "; or ".join(_listed(names) for names in variants.values())
        raise ValueError(f"{source} has none of the published files, plain or gzip. Looked for: {wanted}")
    if len(places) > 1:
        raise ValueError(f"{source} has files of {' and of '.join(places)}; give each a folder of its own")
    ((variant, (place, files)),) = places.items()
    missing = [name for name in variants[variant] if name not in files]
    if missing:
        raise ValueError(f"{place} lacks {_listed(missing)}, which {variant} has too; all of it is needed")
    stamps = {file: stamp(file) for file in files.values()}
    for file, first_stamp in stamps.items():
        if first_stamp.num_bytes == 0:
            raise ValueError(f"{file} line 1: the file is empty; get it again")
    return VariantFiles(variant, stamps)


def _plain_or_gzip(folder: Path, name: str) -> Path | None:
    paths = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if len(paths) > 1:
        raise ValueError(f"{folder} has both {name} and {name}.gz; remove one")
    return paths[0] if paths else None


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:4]) + ([f"... ({len(names)} files)"] if len(names) > 4 else [])
    return ", ".join(shown)


def check_unchanged(file: Path, first_stamp: Stamp) -> None:
    try:
        is_same = stamp(file) == first_stamp
    except FileNotFoundError:
        is_same = False
    if not is_same:
        raise ValueError(f"{file} has changed or gone since it was found; prepare it again once it stays as it is")


@contextmanager
def checked(file: Path, first_stamp: Stamp) -> Iterator[None]:
    """Checks the gzip data while the file is read, and at the end that the file is unchanged."""
    stop = Event()
    with ThreadPoolExecutor(1) as executor:
        checking = executor.submit(gzip_problem, file, stop)
        try:
            yield
            problem = checking.result()
        finally:
            stop.set()
    check_unchanged(file, first_stamp)
    if problem is not None:
        raise ValueError(f"{file}: {problem}; get the file again")


def gzip_problem(file: Path, stop: Event | None = None) -> str | None:
    """Returns what is wrong with gzip data; None if nothing is, or if `stop` was set meanwhile.

    The engine checks neither checksums nor sizes.
    """
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
