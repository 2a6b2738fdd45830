"""Resumes a run when its command is given again: finds its checkpoint and checks that the recipe still fits."""

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nestpipe.checkpoint import (
    BEST,
    RUN,
    CheckpointError,
    Saver,
    agree,
    check_ours,
    claim,
    move_away,
    newest_checkpoint,
    read_recipe,
)
from nestpipe.distributed import World
from nestpipe.recipe.config import Config
from nestpipe.recipe.text import parse_config
from nestpipe.recipe.value import ConfigError, literal

_FREE_SECTIONS = ("evaluate", "published", "logging", "checkpoint", "distributed", "memory")
_FREE_KEYS = (
    "train.steps",
    "tables.max_rows",
    "tables.placement",
    "exchange.replicas",
    "exchange.check_replicas",
    "exchange.hosts",
    "data.num_workers",
)
"""Sections and keys that may differ when a run resumes: its length, what is watched and saved, who reads, where rows
and ranks are, and limits that an error message may have told the user to raise."""
_MACHINE_KEYS = (("store", "num_threads"), ("runtime", "dense_threads"), ("runtime", "device"))
"""Keys that default to what this machine has. Bits may depend on them, so a resumed run keeps its first values."""


def open_folders(config: Config, world: World, fresh: bool, saver: Saver) -> Path | None:
    """Claims the run's folders of checkpoints and returns the one to resume from; None if it has no checkpoint.

    All ranks call it before training, so that a folder that cannot be used is refused now and not at the first save.
    The saver holds the folders: another run that would write to them is refused.
    """
    section = config.checkpoint
    named = {RUN: section.dir, BEST: section.best}
    folders = {holds: Path(name).resolve() for holds, name in named.items() if name is not None}
    if len(set(folders.values())) < len(folders):
        raise ConfigError(
            f"checkpoint.dir and checkpoint.best are both {section.dir}; the best model needs its own folder"
        )

    def claim_and_find() -> str:
        for holds, folder in folders.items():
            check_ours(folder, holds)
        for folder in folders.values() if fresh and not _is_restart() else ():
            if (moved := move_away(folder)) is not None:
                print(f"nestpipe: {folder} was moved to {moved}", flush=True)
        for holds, folder in folders.items():
            claim(folder, holds)
            saver.hold(folder)
        return "" if section.dir is None else str(newest_checkpoint(folders[RUN])[0] or "")

    newest = agree(world, claim_and_find, "opening the folders of checkpoints", only_rank=0)[0] if folders else ""
    if not newest:
        return None
    _check_same_recipe(config, Path(newest), world.size)
    return folders[RUN]


def with_saved_machine_keys(config: Config, fresh: bool) -> Config:
    """Returns the config with unset machine keys taken from the checkpoint that the run will resume from."""
    if config.checkpoint.dir is None or (fresh and not _is_restart()):
        return config
    newest, _ = newest_checkpoint(Path(config.checkpoint.dir).resolve())
    saved = None if newest is None else _saved_config(newest)
    for section, key in _MACHINE_KEYS if saved is not None else ():
        part = getattr(config, section)
        if getattr(part, key) is None:
            config = replace(config, **{section: replace(part, **{key: getattr(getattr(saved, section), key)})})
    return config


def _is_restart() -> bool:
    """Returns whether torchrun restarted these ranks after a failure: work of the first start must not be repeated."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _saved_config(checkpoint: Path) -> Config:
    recipe, _ = read_recipe(checkpoint)
    return parse_config(recipe, f"the recipe of {checkpoint}")


def _check_same_recipe(config: Config, checkpoint: Path, world_size: int) -> None:
    """Refuses another recipe. Another number of ranks may have another batch size, with the same global batch."""
    recipe, num_saved = read_recipe(checkpoint)
    saved_config = parse_config(recipe, f"the recipe of {checkpoint}")
    different = differences(saved_config, config)
    saved, current = _flat(saved_config), _flat(config)
    global_batch = saved_config.train.batch_size * num_saved
    is_same_batch = config.train.batch_size * world_size == global_batch
    if num_saved != world_size and is_same_batch:
        different = [name for name in different if name != "train.batch_size"]
    elif num_saved != world_size:
        different = list(dict.fromkeys([*different, "train.batch_size"]))
    if not different:
        return
    texts = [f"{name} was {_shown(saved.get(name))}, is {_shown(current.get(name))}" for name in different]
    if num_saved != world_size and not is_same_batch:
        texts.append(
            f"{num_saved} ranks had a global batch of {global_batch}, {world_size} ranks must have the same one"
        )
    raise CheckpointError(
        f"{checkpoint} was saved by a run with another recipe: {'; '.join(texts)}. Set back what differs to resume it; "
        "or begin a new run with --fresh, which keeps the old folder under another name, or with another "
        "checkpoint.dir, and checkpoint.load to start from a saved model"
    )


def differences(saved: Config, current: Config) -> list[str]:
    """Returns the names of the keys that differ although they must not."""
    before, now = _flat(saved), _flat(current)
    return [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]


def may_change(key: str) -> bool:
    """Returns whether a key of a recipe, such as "train.steps", may differ when a run resumes."""
    section = key.partition(".")[0]
    return section in _FREE_SECTIONS or f"{section}.{key.rpartition('.')[2]}" in _FREE_KEYS


def _flat(config: Config) -> dict[str, Any]:
    """Returns every key that must not change, by its name in a recipe."""
    parts = {field.name: getattr(config, field.name) for field in fields(config)}
    tables = {f"tables.{table.name}": table for table in parts.pop("tables")}
    return {
        name: getattr(part, key.name)
        for section, part in (parts | tables).items()
        for key in fields(part)
        if not may_change(name := f"{section}.{key.name}")
    }


def _shown(value: Any) -> str:
    return "not set" if value is None else literal(value)
