"""Prepares a folder of published files for training: all or nothing, the same bytes each time."""

from pathlib import Path

from nestpipe.data.files.manifest import Manifest, describe_file
from nestpipe.datasets.engine import Engine, EngineError
from nestpipe.datasets.published import find_format
from nestpipe.datasets.target_folder import move_in, unfinished
from nestpipe.datasets.work import Prepared, Progress, PublishedFiles, Work

TIME_BEFORE_CHECKSUMS = 0.98
"""Share of the whole time that the stages before the checksums take."""


def prepare(
    data_format: str,
    source: Path,
    target: Path,
    *,
    skip_bad: bool = False,
    force: bool = False,
    progress: Progress = lambda stage, done: None,
) -> Manifest:
    """Writes the prepared folder `target`. If it is killed, the same call starts over and writes the same files."""
    published = find_format(data_format)
    files = published.find(source)

    def report(stage: str, done: float) -> None:
        progress(stage, TIME_BEFORE_CHECKSUMS * done)

    with unfinished(target, force) as folder:
        with Engine(folder / "spill") as engine:
            try:
                prepared = published.prepare(Work(files, folder, engine, skip_bad, report))
            except EngineError as error:
                raise ValueError(f"DuckDB cannot go on: {error}") from None
        progress("checksums", TIME_BEFORE_CHECKSUMS)
        manifest = _manifest(prepared, files, folder, data_format, skip_bad)
        manifest.write(folder)
        move_in(target, [file.name for file in manifest.files])
    progress("done", 1.0)
    return manifest


def _manifest(prepared: Prepared, source: PublishedFiles, folder: Path, data_format: str, skip_bad: bool) -> Manifest:
    files = [describe_file(folder / file.name, file.split, file.num_rows) for file in prepared.files]
    schema = {field.name: str(field.type) for field in prepared.schema}
    inputs = {file.name: source.stamps[file].num_bytes for file in source.files}
    command = ["nestpipe", "data", "prepare", data_format, *(["--skip-bad"] if skip_bad else [])]
    return Manifest(prepared.kind, source.name, schema, prepared.counts, files, inputs, command)
