"""The command `nestpipe bench checkpoint`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.report import Record


def records(
    quick: bool,
    *,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder on the disk to measure; by default the current one. Needs 10 GB of room."),
    ] = None,
) -> Iterator[Record]:
    from nestpipe.bench.checkpoint.measure import measure

    if folder is None:
        folder = Path(tempfile.gettempdir()) if quick else Path.cwd()
    if not folder.is_dir():
        raise ValueError(f"the folder {folder} of --dir does not exist")
    return measure(folder.resolve(), quick)


BENCHMARK = Benchmark(
    "checkpoint",
    records,
    "Speed of saving and loading relative to the disk, and what a save costs while training goes on.",
)
