"""`nestpipe evaluate`: evaluates a saved model on held-out samples."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nestpipe.checkpoint import CheckpointError, find_checkpoint, read_recipe
from nestpipe.cli.launch import launch
from nestpipe.cli.show import show_evaluation
from nestpipe.cli.this_rank import check_writable, failed, on_this_rank
from nestpipe.recipe.run import evaluate_saved
from nestpipe.recipe.text import change_config, parse_config
from nestpipe.recipe.value import ConfigError


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(help="The checkpoint.dir of a run, or a folder that holds one checkpoint.")
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key of the saved recipe.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Processes to start; any number. Default: as many as saved the model."),
    ] = None,
    path: Annotated[Path | None, typer.Option("--json", help="File for the result.")] = None,
) -> None:
    """Evaluate a saved model as at the end of its training, by the recipe saved with it.

    The default number of ranks gives the numbers of that run, digit for
    digit. With another number, sums over samples may round differently.
    """
    try:
        checkpoint = find_checkpoint(checkpoint)
        recipe, num_saved = read_recipe(checkpoint)
        config = change_config(parse_config(recipe, f"the recipe of {checkpoint}"), settings or ())
        check_writable("--json", path)
    except (ConfigError, CheckpointError) as error:
        raise failed(error, 2) from None
    num_ranks = ranks or num_saved
    if num_ranks > 1 and "WORLD_SIZE" not in os.environ:
        raise typer.Exit(launch(num_ranks, sys.argv[1:]))
    result = on_this_rank(config, lambda resolved, world: evaluate_saved(resolved, world, checkpoint))
    if result is None:
        return
    show_evaluation(result, Console())
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
