"""`nestpipe monitor`: which rank, stage or link made a run slow."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nestpipe.cli.monitor_show import show_measurements, show_slow
from nestpipe.cli.this_rank import check_writable, failed
from nestpipe.diagnosis.findings import find
from nestpipe.diagnosis.run_file import read_measurements
from nestpipe.recipe.value import ConfigError


def monitor(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The logging.dir of a run of several ranks.")],
    path: Annotated[Path | None, typer.Option("--json", help="File for what was found.")] = None,
) -> None:
    """Name the rank, the stage or the link that made a run slow, and show what each rank measured.

    Nothing is named that costs less than 5% of a step, or that all ranks share.
    """
    try:
        check_writable("--json", path)
        measured = read_measurements(run)
    except (ConfigError, OSError, ValueError) as error:
        raise failed(error, 2) from None
    found, console = [asdict(finding) for finding in find(measured)], Console()
    show_slow(found, console, is_asked=True)
    show_measurements(measured, console)
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")
