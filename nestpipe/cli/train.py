"""`nestpipe train`: a recipe, or the demo, on one rank or several."""

import json
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nestpipe.cli.launch import launch
from nestpipe.cli.progress import show_progress
from nestpipe.cli.show import show_summary
from nestpipe.distributed import RankError, World
from nestpipe.pipelining.pipeline import NonFiniteError
from nestpipe.train.checkpoint import CheckpointError
from nestpipe.train.config import Config
from nestpipe.train.config_text import describe, load_config
from nestpipe.train.config_value import ConfigError
from nestpipe.train.run import Summary, run

EXPECTED = (ConfigError, CheckpointError, NonFiniteError, RankError, ValueError, OSError, MemoryError)
"""Errors whose text says it all; any other is shown with its traceback."""


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
    list_keys: Annotated[bool, typer.Option("--list-keys", help="Print every key of a recipe, and stop.")] = False,
) -> None:
    """Train a model. `torchrun ... -m nestpipe train ...` works too, instead of --ranks."""
    console = Console()
    if list_keys:
        console.print(_keys())
        return
    try:
        config = load_config(recipe, settings or ())
        _check_writable("--json", path)
        _check_writable("--trace", trace)
    except ConfigError as error:
        raise _failed(error, 2) from None
    if ranks > 1 and "WORLD_SIZE" not in os.environ:
        raise typer.Exit(launch(ranks, sys.argv[1:]))
    summary = _run_rank(config, console, trace)
    if summary is None:
        return
    show_summary(summary, console)
    if path is not None:
        path.write_text(json.dumps(summary, indent=2) + "\n")


def _run_rank(config: Config, console: Console, trace: Path | None) -> Summary | None:
    """The summary on rank 0, None on the others."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    config = config.resolved(ranks_here, os.cpu_count() or 1)
    world = World.from_environment(config.distributed.timeout_seconds)
    is_first = world.rank == 0
    try:
        with world.watch.reporting():
            bar = show_progress(config.train.steps, config.logging.every, console) if is_first else nullcontext()
            with bar as after_step:
                summary = run(config, world, after_step, trace)
        world.close()
    except KeyboardInterrupt:
        raise _failed(RuntimeError("interrupted (Ctrl-C)"), 130, world) from None
    except Exception as error:
        if not isinstance(error, EXPECTED):
            traceback.print_exc()
        raise _failed(error, 1, world) from None
    return summary if is_first else None


def _failed(error: Exception, code: int, world: World | None = None) -> typer.Exit:
    rank = f"rank {world.rank}: " if world is not None and world.size > 1 else ""
    where = f"{world.watch.where}: " if world is not None and not isinstance(error, RankError) else ""
    text = str(error) or type(error).__name__
    print(f"nestpipe: {rank}{'' if text.startswith(where) else where}{text}", file=sys.stderr, flush=True)
    for note in getattr(error, "__notes__", ()):
        print(f"nestpipe: {rank}{note}", file=sys.stderr, flush=True)
    return typer.Exit(code)


def _check_writable(option: str, path: Path | None) -> None:
    """Before the run, not after it."""
    if path is not None and (not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{path} of {option} cannot be written; give a file in a folder that exists")


def _keys() -> Table:
    table = Table("key", "type", "default", "meaning")
    for row in describe():
        table.add_row(*(text.replace("[", "\\[") for text in row))
    return table
