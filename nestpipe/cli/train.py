"""`nestpipe train`: a recipe, or the demo, on one rank or several."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nestpipe.checkpoint import CheckpointError
from nestpipe.cli.launch import launch
from nestpipe.cli.progress import show_progress
from nestpipe.cli.show import show_summary
from nestpipe.cli.this_rank import check_writable, failed, on_this_rank
from nestpipe.distributed import World
from nestpipe.recipe.config import Config
from nestpipe.recipe.resume import with_saved_machine_keys
from nestpipe.recipe.run import Summary, run
from nestpipe.recipe.text import describe, load_config
from nestpipe.recipe.trace_file import parse_steps
from nestpipe.recipe.value import ConfigError


def train(
    recipe: Annotated[Path | None, typer.Argument(help="A TOML file; without one, the demo is trained.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key of the recipe.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Processes to start on this machine.")] = 1,
    path: Annotated[Path | None, typer.Option("--json", help="File for the summary of the run.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="File for a trace of all ranks and lanes, for ui.perfetto.dev.")
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Begin a new run; what is in checkpoint.dir is kept as DIR.1, DIR.2, ..."),
    ] = False,
    trace_steps: Annotated[
        str | None,
        typer.Option("--trace-steps", metavar="A:B", help="Trace steps A to B - 1; without it, the first 1,000."),
    ] = None,
    list_keys: Annotated[bool, typer.Option("--list-keys", help="Print every key of a recipe, and stop.")] = False,
) -> None:
    """Train a model. `torchrun ... -m nestpipe train ...` works too, instead of --ranks.

    If checkpoint.dir is set, the same command given again resumes from the newest checkpoint there.
    """
    console = Console()
    if list_keys:
        console.print(_keys())
        return
    try:
        config = with_saved_machine_keys(load_config(recipe, settings or ()), fresh)
        check_writable("--json", path)
        check_writable("--trace", trace)
        steps = _traced_steps(trace, trace_steps)
    except (ConfigError, CheckpointError, OSError) as error:
        raise failed(error, 2) from None
    if ranks > 1 and "WORLD_SIZE" not in os.environ:
        raise typer.Exit(launch(ranks, sys.argv[1:]))
    summaries: list[Summary] = []  # of this rank, whichever it is

    def work(resolved: Config, world: World) -> Summary:
        summaries.append(_run(resolved, world, console, trace, steps, fresh))
        return summaries[0]

    summary = on_this_rank(config, work, trains=True)
    if summaries[0]["is_stop_requested"]:
        raise typer.Exit(_stopped(config, summaries[0], is_said=summary is not None))
    if summary is None:
        return
    show_summary(summary, console)
    if path is not None:
        path.write_text(json.dumps(summary, indent=2) + "\n")


def _run(
    config: Config, world: World, console: Console, trace: Path | None, steps: range | None, fresh: bool
) -> Summary:
    if world.rank > 0:
        return run(config, world, None, trace, steps, fresh)
    with show_progress(config.train.steps, config.logging.every, console) as after_step:
        return run(config, world, after_step, trace, steps, fresh)


def _stopped(config: Config, summary: Summary, is_said: bool) -> int:
    """Returns the exit code of a run that SIGTERM has stopped: 0 if the same command resumes it. Says so, if wanted."""
    folder = config.checkpoint.dir
    then = "checkpoint.dir is not set, so nothing was saved" if folder is None else f"the same command resumes {folder}"
    if is_said:
        text = f"stopped by SIGTERM after {summary['steps']} steps; {then}"
        print(f"nestpipe: {text}", file=sys.stderr, flush=True)
    return 0 if folder is not None else 128 + signal.SIGTERM


def _traced_steps(trace: Path | None, text: str | None) -> range | None:
    if text is None:
        return None
    if trace is None:
        raise ConfigError("--trace-steps says what to trace, but --trace, the file to write it to, is missing")
    try:
        return parse_steps(text)
    except ValueError as error:
        raise ConfigError(f"--trace-steps: {error}") from None


def _keys() -> Table:
    table = Table("key", "type", "default", "meaning")
    for row in describe():
        table.add_row(*(text.replace("[", "\\[") for text in row))
    return table
