"""From a folder of published files to a prepared folder: all or nothing, the same bytes each time."""

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nestpipe.data.published.criteo import find_criteo, prepare_criteo
from nestpipe.data.published.engine import Engine, EngineError
from nestpipe.data.published.kuairand import find_kuairand, prepare_kuairand
from nestpipe.data.published.manifest import MANIFEST, Manifest, describe_file
from nestpipe.data.published.movielens import find_movielens, prepare_movielens
from nestpipe.data.published.work import Prepared, Progress, Source, Work

UNFINISHED = "unfinished"
"""the folder within the prepared one that has everything until the end; it marks what may be started over"""
WITHOUT_CHECKSUMS = 0.98
"""of the time, that all stages before them take"""
_OURS = re.compile(r"(users|train|validation|test)-\d{5}\.parquet|(items|user_ids)\.parquet|manifest\.json\.unfinished")


@dataclass(frozen=True)
class _Format:
    find: Callable[[Path], Source]
    prepare: Callable[[Work], Prepared]


_FORMATS = {
    "kuairand": _Format(find_kuairand, prepare_kuairand),
    "movielens": _Format(find_movielens, prepare_movielens),
    "criteo": _Format(find_criteo, prepare_criteo),
}


def prepare(
    data_format: str,
    source: Path,
    target: Path,
    *,
    skip_bad: bool = False,
    force: bool = False,
    progress: Progress = lambda stage, done: None,
) -> Manifest:
    """Killed at any moment and called again, it starts over and ends with the same files and the same manifest."""
    if data_format not in _FORMATS:
        raise ValueError(f"there is no format {data_format!r}; formats are {', '.join(_FORMATS)}")
    found = _FORMATS[data_format].find(source)
    with _unfinished(target, force) as folder:
        with Engine(folder / "spill") as engine:
            work = Work(found, folder, engine, skip_bad, lambda stage, done: progress(stage, WITHOUT_CHECKSUMS * done))
            try:
                prepared = _FORMATS[data_format].prepare(work)
            except EngineError as error:
                raise ValueError(f"DuckDB cannot go on: {error}") from None
        progress("checksums", WITHOUT_CHECKSUMS)
        manifest = _manifest(prepared, found, folder, data_format, skip_bad)
        for file in manifest.files:
            (folder / file.name).replace(target / file.name)
        manifest.write(target)
    progress("done", 1.0)
    return manifest


def _manifest(prepared: Prepared, source: Source, folder: Path, data_format: str, skip_bad: bool) -> Manifest:
    files = [describe_file(folder / made.name, made.split, made.num_rows) for made in prepared.files]
    schema = {field.name: str(field.type) for field in prepared.schema}
    inputs = {file.name: file.stat().st_size for file in source.files}
    command = ["nestpipe", "data", "prepare", data_format, *(["--skip-bad"] if skip_bad else [])]
    return Manifest(prepared.kind, source.name, schema, prepared.counts, files, inputs, command)


@contextmanager
def _unfinished(target: Path, force: bool) -> Iterator[Path]:
    """The folder to work in, fresh, and removed in the end; one process at a time."""
    folder = target / UNFINISHED
    if (target / MANIFEST).exists():
        if not force:
            raise ValueError(f"{target} is prepared already; use it, or replace it with --force")
    elif target.exists() and not folder.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and was not made by `nestpipe data prepare`; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{target} is being prepared by another process; wait for it, or end it") from None
        try:
            _clear(target, folder)
            yield folder
        finally:
            shutil.rmtree(folder)
            if not any(target.iterdir()):
                target.rmdir()


def _clear(target: Path, folder: Path) -> None:
    """What a run before this one left; the manifest first, which says that the rest is there."""
    (target / MANIFEST).unlink(missing_ok=True)
    for path in target.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
