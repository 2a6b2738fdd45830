"""The number of micro-batches of a run with pipeline.num_micro_batches = "auto": chosen once, then kept.

The choice is in checkpoint.dir before the first step, and its number in every checkpoint. So a run that resumes has the
number that it began with, even if it was killed before its first checkpoint.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestpipe.checkpoint import CheckpointError, agree, newest_checkpoint, write_synced
from nestpipe.checkpoint.manifest import read_manifest
from nestpipe.distributed import World
from nestpipe.prediction.advice import advice
from nestpipe.prediction.choose import Choice, choose_num_micro_batches
from nestpipe.prediction.measure import crosses_batches
from nestpipe.prediction.work import Way
from nestpipe.recipe.build import Run
from nestpipe.recipe.config import AUTO, Config
from nestpipe.recipe.resume import differences
from nestpipe.recipe.text import parse_config, to_toml
from nestpipe.train.trainer import Trainer

FILE = "nestpipe-micro-batches.json"


def set_micro_batches(config: Config, this_run: Run, will_train: bool) -> Choice | None:
    """Sets the number of micro-batches of a run that has it chosen, and returns the choice. All ranks call it, after
    the folders of checkpoints were opened. Returns None if the recipe has a number, or if no choice is known."""
    if config.pipeline.num_micro_batches != AUTO:
        return None
    trainer, world = this_run.trainer, this_run.trainer.world
    folder = None if config.checkpoint.dir is None else Path(config.checkpoint.dir).resolve()
    choice, num_saved = _saved(config, world, folder)
    if choice is None and num_saved is None and will_train:
        with world.watch.doing("the choice of a number of micro-batches"):
            choice = choose_num_micro_batches(trainer, this_run.batches)
        if folder is not None:
            _write(config, world, folder, choice)
        if world.rank == 0:
            print(f"nestpipe: {text_of(choice)}", flush=True)
    num = num_saved or (choice.num_micro_batches if choice is not None else None)
    if num is not None:
        trainer.split_into(num)
    return choice


def splitting(fields: Mapping[str, float], trainer: Trainer, choice: Choice | None) -> dict[str, Any]:
    """Returns what another number of micro-batches would give, for the summary of a run: predicted step times if the
    number was chosen, and a sentence."""
    options, world = trainer.options, trainer.world
    if choice is not None:
        steps = {str(num): step_ms for num, step_ms in choice.predicted_step_ms.items()}
        return {"predicted_step_ms": steps, "text": text_of(choice)}
    way = Way(options.schedule, options.schedule, cross_batch=crosses_batches(trainer))
    num, has_issuer = options.num_micro_batches, world.issuer is not None
    return {"predicted_step_ms": {}, "text": advice(fields, way, num, world.size, has_issuer)}


def text_of(choice: Choice) -> str:
    """Returns a choice in one line."""
    steps = ", ".join(f"{num}: {step_ms:.1f}" for num, step_ms in choice.predicted_step_ms.items())
    predicted = f"; predicted milliseconds of a step: {steps}" if steps else ""
    return f"pipeline.num_micro_batches = {AUTO} has chosen {choice.num_micro_batches}: {choice.why}{predicted}"


def _saved(config: Config, world: World, folder: Path | None) -> tuple[Choice | None, int | None]:
    """Returns the choice that this run has written, and the number of its newest checkpoint; None for what is not
    there."""
    if folder is None:
        return None, None

    def read() -> str:
        newest, _ = newest_checkpoint(folder)
        number = None if newest is None else read_manifest(newest)["num_micro_batches"]
        choice = _read(config, world, folder, number)
        return json.dumps([None if choice is None else choice.to_json(), number])

    text, number = json.loads(agree(world, read, "reading the number of micro-batches", only_rank=0)[0])
    return None if text is None else Choice.from_json(text), number


def _read(config: Config, world: World, folder: Path, number: int | None) -> Choice | None:
    """Returns the choice in a folder; None if there is none, or if it is that of another run."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text())
        choice, ranks = Choice.from_json(json.dumps(content["choice"])), content["ranks"]
        saved = parse_config(content["recipe"], f"the recipe of {file}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file}, which has the number of micro-batches of this run, cannot be read: {error}; restore it, or "
            "remove it to have the number chosen anew"
        ) from None
    is_same_run = number == choice.num_micro_batches or (ranks == world.size and not differences(saved, config))
    return choice if is_same_run else None


def _write(config: Config, world: World, folder: Path, choice: Choice) -> None:
    content = {"choice": json.loads(choice.to_json()), "ranks": world.size, "recipe": to_toml(config)}

    def write() -> str:
        write_synced(folder / FILE, json.dumps(content, indent=2) + "\n")
        return ""

    agree(world, write, "writing the number of micro-batches", only_rank=0)
