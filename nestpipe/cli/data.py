"""`nestpipe data`: published files to prepared folders; files in their formats to try it with; what is in data."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nestpipe.cli.data_inspect import as_json, show_inspection
from nestpipe.cli.data_progress import show_prepared, show_stages
from nestpipe.cli.this_rank import check_writable, failed

app = typer.Typer(
    help="Prepare published data for training, generate files like it, or see what is in data.", no_args_is_help=True
)


class Format(StrEnum):
    """Of published files."""

    KUAIRAND = "kuairand"
    MOVIELENS = "movielens"
    CRITEO = "criteo"


DataFormat = Annotated[Format, typer.Argument(metavar="FORMAT", help="kuairand, movielens or criteo.")]


@app.command()
def prepare(
    data_format: DataFormat,
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder with the published files, plain or gzip.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make: Parquet files and a manifest.")],
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out, and count them.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished DST.")] = False,
) -> None:
    """From published files to Parquet, in bounded memory: filtered, sorted and re-indexed as is usual for the data."""
    from nestpipe.datasets.prepare import prepare as prepare_files  # an engine, which nothing else needs

    console = Console()
    try:
        with show_stages(console) as progress:
            manifest = prepare_files(data_format, source, target, skip_bad=skip_bad, force=force, progress=progress)
    except (ValueError, OSError) as error:
        raise failed(error, 2) from None
    except KeyboardInterrupt:
        raise failed(RuntimeError(f"interrupted (Ctrl-C); the same command starts over in {target}"), 130) from None
    show_prepared(manifest, target, console)


@app.command()
def generate(
    data_format: DataFormat,
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make, as a download would be.")],
    num_rows: Annotated[int, typer.Option("--rows", min=1, help="Lines of the logs, ratings or clicks.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same bytes.")] = 0,
    variant: Annotated[
        str | None, typer.Option("--variant", help="27k, 1k, pure; 1m, 20m; kaggle, terabyte. Default: the first.")
    ] = None,
) -> None:
    """Files in a published format whose contents are made up, as skewed and as unsorted as the real ones."""
    from nestpipe.datasets.generate import generate as generate_files

    try:
        files = generate_files(data_format, target, num_rows, seed=seed, variant=variant)
    except (ValueError, OSError) as error:
        raise failed(error, 2) from None
    for file in files:
        typer.echo(f"{file.relative_to(target)}: {file.stat().st_size:,} bytes")


@app.command()
def inspect(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="A prepared folder; or Parquet, Arrow files.")],
    keys: Annotated[str, typer.Option("--keys", help="Key columns of files, with commas between.")] = "",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Of a global batch. Default: 2048; of histories 128.")
    ] = None,
    dim: Annotated[int, typer.Option("--dim", min=1, help="Columns of a row, for the estimate of memory.")] = 64,
    optimizer: Annotated[str, typer.Option("--optimizer", help="Of the rows: what state they have.")] = "adagrad",
    max_length: Annotated[int, typer.Option("--max-length", min=1, help="Of histories: most items of one.")] = 200,
    path: Annotated[Path | None, typer.Option("--json", help="File for the result.")] = None,
) -> None:
    """What is in data: columns, counts, skew of the keys, what batches share; how much memory the rows will take."""
    from nestpipe.data.inspect import STATE_COLUMNS
    from nestpipe.data.inspect import inspect as inspect_files

    console = Console()
    try:
        if optimizer not in STATE_COLUMNS:
            raise ValueError(f"--optimizer is {optimizer!r}, must be one of {', '.join(STATE_COLUMNS)}")
        check_writable("--json", path)
        named = [name for name in keys.split(",") if name]
        with show_stages(console) as report:
            found = inspect_files(paths, named, batch_size, max_length, report)
    except (ValueError, OSError) as error:
        raise failed(error, 2) from None
    show_inspection(found, dim, optimizer, console)
    if path is not None:
        path.write_text(json.dumps(as_json(found, dim, optimizer), indent=2) + "\n")
