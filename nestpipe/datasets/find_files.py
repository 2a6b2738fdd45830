"""Finding published files: plain or gzip, in the folder or where archives put them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nestpipe.datasets.input_checks import Stamp, stamp


class Found(NamedTuple):
    variant: str
    files: dict[Path, Stamp]
    """in their order, as they were before anything was read"""


def find_variant(source: Path, variants: Mapping[str, Sequence[str]], folders: Mapping[str, Sequence[str]]) -> Found:
    """The one variant whose files are there, and the files. `folders`: where below `source` they may be."""
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give the one with the published files")
    found = {}
    for variant, names in variants.items():
        for folder in folders[variant]:
            files = {name: file for name in names if (file := _plain_or_gzip(source / folder, name)) is not None}
            if files:
                found[variant] = source / folder, files
                break
    if not found:
        wanted = "; or ".join(_listed(names) for names in variants.values())
        raise ValueError(f"{source} has none of the published files, plain or gzip. Looked for: {wanted}")
    if len(found) > 1:
        raise ValueError(f"{source} has files of {' and of '.join(found)}; give each a folder of its own")
    ((variant, (folder_found, files)),) = found.items()
    missing = [name for name in variants[variant] if name not in files]
    if missing:
        raise ValueError(f"{folder_found} lacks {_listed(missing)}, which {variant} has too; all of it is needed")
    stamps = {file: stamp(file) for file in files.values()}
    _check_not_empty(stamps)
    return Found(variant, stamps)


def _plain_or_gzip(folder: Path, name: str) -> Path | None:
    there = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if len(there) > 1:
        raise ValueError(f"{folder} has both {name} and {name}.gz; remove one")
    return there[0] if there else None


def _check_not_empty(files: Mapping[Path, Stamp]) -> None:
    for file, found in files.items():
        if found.num_bytes == 0:
            raise ValueError(f"{file} line 1: the file is empty; get it again")


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:4]) + ([f"... ({len(names)} files)"] if len(names) > 4 else [])
    return ", ".join(shown)
