"""`nestpipe report`: a picture of runs."""

from pathlib import Path
from typing import Annotated

import typer

from nestpipe.cli.this_rank import failed


def report(
    traces: Annotated[
        list[Path], typer.Argument(metavar="RUN_OR_TRACE...", help="Folders of logging.dir, or files of `--trace`.")
    ],
    out: Annotated[Path, typer.Option("--out", help="File for the picture, as SVG. It is overwritten.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to draw of each run.")] = 2,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank to draw.")] = 0,
) -> None:
    """Draw a few typical steps of runs, one above the other on the same scale: which lane does what when."""
    from nestpipe.report.timeline import draw_timeline
    from nestpipe.report.trace import read_trace

    try:
        drawing = draw_timeline([read_trace(path, rank) for path in traces], steps)
        out.write_text(drawing)
    except (OSError, ValueError) as error:
        raise failed(error, 2) from None
    typer.echo(f"wrote {out}")
