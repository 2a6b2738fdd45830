"""`nestpipe data`: prepares published data sets, generates files in their formats, and inspects data."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nestpipe.cli.data_inspect import as_json, bytes_of_record, show_inspection
from nestpipe.cli.data_progress import show_prepared, show_stages
from nestpipe.cli.this_rank import check_writable, failed
from nestpipe.datasets.published import published_formats

app = typer.Typer(
    help="Prepare published data for training, generate files in its formats, or inspect data.", no_args_is_help=True
)

FORMATS = published_formats()
VARIANTS = "; ".join(f"{name}: {', '.join(published.variants)}" for name, published in FORMATS.items())

DataFormat = Annotated[
    str,
    typer.Argument(metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.", autocompletion=lambda: list(FORMATS)),
]


@app.command()
def prepare(
    data_format: DataFormat,
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder with the published files, plain or gzip.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make: Parquet files and a manifest.")],
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out, and count them.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished DST.")] = False,
) -> None:
    """Convert published files to Parquet, filtered, sorted and re-indexed as is usual for the data."""
    from nestpipe.datasets.prepare import prepare as prepare_files

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
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same bytes.")] = 0,
    variant: Annotated[str | None, typer.Option("--variant", help=f"The first is the default. {VARIANTS}.")] = None,
) -> None:
    """Generate files in a published format, as skewed and as unsorted as the real ones."""
    from nestpipe.datasets.generate import generate as generate_files

    try:
        files = generate_files(data_format, target, num_rows, seed=seed, variant=variant)
    except (ValueError, OSError) as error:
        raise failed(error, 2) from None
    for file in files:
        typer.echo(f"{file.relative_to(target)}: {file.stat().st_size:,} bytes")


@app.command()
def inspect(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="A prepared folder, or Parquet and Arrow files.")
    ],
    keys: Annotated[str, typer.Option("--keys", help="Key columns of files, separated by commas.")] = "",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Global batch size. Default: 2048; for histories 128.")
    ] = None,
    dim: Annotated[int, typer.Option("--dim", min=1, help="Columns of a row, for the estimate of memory.")] = 64,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="Row optimizer, which determines the row state.")
    ] = "adagrad",
    max_length: Annotated[int, typer.Option("--max-length", min=1, help="Largest number of items of a history.")] = 200,
    path: Annotated[Path | None, typer.Option("--json", help="File for the result.")] = None,
) -> None:
    """Show columns, counts, skew of the keys and what batches share; estimate the memory of the rows."""
    from nestpipe.data.inspect import inspect as inspect_files

    console = Console()
    try:
        bytes_of_record(dim, optimizer)
        check_writable("--json", path)
        key_columns = [name for name in keys.split(",") if name]
        with show_stages(console) as report:
            inspection = inspect_files(paths, key_columns, batch_size, max_length, report)
    except (ValueError, OSError) as error:
        raise failed(error, 2) from None
    show_inspection(inspection, dim, optimizer, console)
    if path is not None:
        path.write_text(json.dumps(as_json(inspection, dim, optimizer), indent=2) + "\n")
