"""`nestpipe plan`: what a recipe needs on a number of workers, and whether they have it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nestpipe import __version__
from nestpipe.cli.plan_show import show_plan
from nestpipe.cli.this_rank import EXPECTED, check_writable, failed
from nestpipe.recipe.text import load_config
from nestpipe.recipe.value import ConfigError
from nestpipe.sizing.limits import GB, Limits
from nestpipe.sizing.plan import plan as make_plan

LEAST_WIDTH = 120


def plan(
    recipe: Annotated[Path, typer.Argument(help="A TOML file.")],
    workers: Annotated[int, typer.Option("--workers", min=1, help="Ranks, with a device each if there are devices.")],
    host_memory: Annotated[float, typer.Option("--host-memory", metavar="GB", help="Host memory of a worker.")],
    device_memory: Annotated[
        float | None,
        typer.Option(
            "--device-memory",
            metavar="GB",
            help="Device memory of a worker. Without an accelerator, all memory is host memory.",
        ),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(
            "--network",
            metavar="RATE",
            help="Gigabytes a second of a worker, each way. Without it, the network of the default cluster.",
        ),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="TABLE=N", help="Rows of a table, over all workers; instead of max_rows."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key of the recipe.")
    ] = None,
    path: Annotated[Path | None, typer.Option("--json", help="File for the result.")] = None,
) -> None:
    """Say what a recipe needs on a number of workers: the memory of each, and the time of a step.

    Trains a few steps on one rank to measure it, and keeps nothing of them. Exits with 1, and says what would help, if
    the recipe does not fit.
    """
    try:
        config = load_config(recipe, settings or ())
        check_writable("--json", path)
        for option, value in (
            ("--host-memory", host_memory),
            ("--device-memory", device_memory),
            ("--network", network),
        ):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{option} is {value}, must be above 0")
        given = dict(map(_rows, rows or ()))
    except (ConfigError, OSError) as error:
        raise failed(error, 2) from None
    limits = Limits(host_memory * GB, None if device_memory is None else device_memory * GB)
    try:
        made = make_plan(config, workers, limits, network, given)
    except EXPECTED as error:
        raise failed(error, 2) from None
    show_plan(made, Console(width=max(LEAST_WIDTH, Console().width)))
    if path is not None:
        path.write_text(json.dumps({"command": "plan", "version": __version__, **made.to_json()}, indent=2) + "\n")
    if made.problems:
        raise failed(ValueError(_refusal(made.problems, made.remedies)), 1)


def _refusal(problems: Sequence[str], remedies: Sequence[str]) -> str:
    does_not = f"this recipe does not fit: {'; '.join(problems)}"
    remedy = f"Each of these alone makes it fit: {'; or '.join(remedies)}" if remedies else "No single change helps"
    return f"{does_not}. {remedy}"


def _rows(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not (name and number.isdecimal() and int(number) > 0):
        raise ConfigError(f"--rows is {text!r}, must be TABLE=N with a whole number above 0")
    return name, int(number)
