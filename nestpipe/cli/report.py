"""`nestpipe report`: a page or a picture of runs."""

from pathlib import Path
from typing import Annotated

import typer

from nestpipe.cli.this_rank import failed


def report(
    traces: Annotated[
        list[Path], typer.Argument(metavar="RUN_OR_TRACE...", help="Folders of logging.dir, or files of `--trace`.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="File to write: .html for a page, .svg for its timeline. It is overwritten.")
    ],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to draw of each run.")] = 2,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank whose steps are drawn.")] = 0,
) -> None:
    """Show runs, in the order given: which lane does what when, where the time goes, bytes, losses and metrics."""
    try:
        out.write_text(_content(traces, out, steps, rank))
    except (OSError, ValueError) as error:
        raise failed(error, 2) from None
    typer.echo(f"wrote {out}")


def _content(traces: list[Path], out: Path, steps: int, rank: int) -> str:
    suffix = out.suffix.lower()
    if suffix == ".html":
        from nestpipe.report.page import write_page
        from nestpipe.report.run_files import read_runs

        return write_page(read_runs(traces, rank), steps)
    if suffix == ".svg":
        from nestpipe.report.timeline import draw_timeline
        from nestpipe.report.trace import read_trace

        return draw_timeline([read_trace(path, rank) for path in traces], steps)
    raise ValueError(f"--out is {out}, but must end in .html, for a page, or in .svg, for the timeline alone")
