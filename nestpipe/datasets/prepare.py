"""From a folder of published files to a prepared folder: all or nothing, the same bytes each time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nestpipe.data.files.manifest import Manifest, describe_file
from nestpipe.datasets.criteo import find_criteo, prepare_criteo
from nestpipe.datasets.engine import Engine, EngineError
from nestpipe.datasets.kuairand import find_kuairand, prepare_kuairand
from nestpipe.datasets.movielens import find_movielens, prepare_movielens
from nestpipe.datasets.target_folder import move_in, unfinished
from nestpipe.datasets.work import Prepared, Progress, Source, Work

WITHOUT_CHECKSUMS = 0.98
"""of the time, that all stages before them take"""


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
    with unfinished(target, force) as folder:
        with Engine(folder / "spill") as engine:
            work = Work(found, folder, engine, skip_bad, lambda stage, done: progress(stage, WITHOUT_CHECKSUMS * done))
            try:
                prepared = _FORMATS[data_format].prepare(work)
            except EngineError as error:
                raise ValueError(f"DuckDB cannot go on: {error}") from None
        progress("checksums", WITHOUT_CHECKSUMS)
        manifest = _manifest(prepared, found, folder, data_format, skip_bad)
        manifest.write(folder)
        move_in(target, [file.name for file in manifest.files])
    progress("done", 1.0)
    return manifest


def _manifest(prepared: Prepared, source: Source, folder: Path, data_format: str, skip_bad: bool) -> Manifest:
    files = [describe_file(folder / made.name, made.split, made.num_rows) for made in prepared.files]
    schema = {field.name: str(field.type) for field in prepared.schema}
    inputs = {file.name: source.stamps[file].num_bytes for file in source.files}
    command = ["nestpipe", "data", "prepare", data_format, *(["--skip-bad"] if skip_bad else [])]
    return Manifest(prepared.kind, source.name, schema, prepared.counts, files, inputs, command)
