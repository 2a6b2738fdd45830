"""The command `nestpipe bench faults`."""

import sys
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
    count: Annotated[int, typer.Option("--count", min=1, help="Number of faults.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the first fault of each kind.")] = 0,
    kind: Annotated[str | None, typer.Option("--kind", help="Only faults of this kind.")] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on after a fault with a loss.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Faults that are played at once.")] = 2,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder for the runs; by default that of temporary files.")
    ] = None,
) -> Iterator[Record]:
    from nestpipe.bench.faults.measure import check_possible  # imports what `nestpipe --help` does not need

    check_possible(kind)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"the folder {folder} of --dir does not exist")
    return _records(quick, count, seed, kind, keep_going, jobs, (folder or Path(tempfile.gettempdir())).resolve())


def _records(
    quick: bool, count: int, seed: int, kind: str | None, keep_going: bool, jobs: int, folder: Path
) -> Iterator[Record]:
    from nestpipe.bench.faults.measure import FaultError, measure

    try:
        yield from measure(quick, count, seed, kind, keep_going, jobs, folder)
    except FaultError as error:
        print(f"nestpipe: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(1) from None


BENCHMARK = Benchmark(
    "faults",
    records,
    "Runs that are killed, stopped, or whose checkpoints are damaged: what they lose when they are started again.",
)
