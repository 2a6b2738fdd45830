"""Saves and loads a Trainer. A load checks everything before it changes anything.

A checkpoint is a folder: `rank<r>.pt` with the rows each rank owns, `dense.pt` with the model and its optimizer, and
`manifest.json` with the settings that must agree for an exact continuation and a checksum of each file.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from nestpipe.distributed.world import World
from nestpipe.embedding.table import Table
from nestpipe.pipelining.pipeline import make_store
from nestpipe.store import NUM_BUCKETS, Piece, Store
from nestpipe.train.checkpoint import folder
from nestpipe.train.checkpoint.files import Written, plain, read, write
from nestpipe.train.checkpoint.folder import CheckpointError, read_manifest
from nestpipe.train.checkpoint.match import check_dense, check_tables, describe_dense, describe_tables
from nestpipe.train.digest import content_digest

if TYPE_CHECKING:
    from nestpipe.train.trainer import Trainer

FORMAT = 2


def save(trainer: "Trainer", path: Path, extra: dict[str, Any], replaces_newer: bool) -> None:
    """Writes a checkpoint. All ranks call it, with a folder that all of them see."""
    world, path = trainer.world, path.resolve()
    what = f"saving to {path}"
    state: dict[str, Any] = {}

    def collect() -> str:
        """Refuses what could not be loaded again, before anything is written."""
        state["dense"] = plain({**_dense_state(trainer), "extra": extra}, "the saved state")
        state["own"] = plain(_buffers_and_extra_state(trainer.model), "the model's state")
        state["data"] = plain(trainer.data_state(), "the state of the data")
        return content_digest(state["own"])

    def begin() -> str:
        folder.claim(path)
        newest, _ = folder.newest_checkpoint(path)
        if newest is not None and not replaces_newer:
            _refuse_newer(newest, trainer.num_steps)
        return str(folder.begin(path, trainer.num_steps))

    def write_rank() -> str:
        pieces = {t.name: tuple(trainer.store.export_piece(t.name, 0, NUM_BUCKETS)) for t in trainer.tables}
        content = {"rows": plain(pieces, "rows"), "data": state["data"]}
        if has_own_state:
            content["model"] = state["own"]
        return json.dumps(write(staging / f"rank{world.rank}.pt", content))

    def write_rest() -> str:
        files = {f"rank{rank}.pt": Written(*json.loads(text)) for rank, text in enumerate(written)}
        files["dense.pt"] = write(staging / "dense.pt", state["dense"])
        manifest = {
            "format": FORMAT,
            "world_size": world.size,
            "num_steps": trainer.num_steps,
            "seed": trainer.seed,
            "tables": describe_tables(trainer.tables, trainer.seed),
            "dense": describe_dense(trainer),
            "recipe": trainer.recipe,
            "checksums": {name: file.checksum for name, file in files.items()},
            "sizes": {name: file.num_bytes for name, file in files.items()},
        }
        folder.write_synced(staging / folder.MANIFEST, json.dumps(manifest, indent=2))
        folder.publish(staging)
        return ""

    has_own_state = len(set(agree(world, collect, what))) > 1  # BatchNorm's statistics, for example, differ by rank
    staging = Path(agree(world, begin, what, only_rank=0)[0])
    try:
        written = agree(world, write_rank, what)
        agree(world, write_rest, what, only_rank=0)
    except CheckpointError:
        if world.rank == 0:
            folder.discard(staging)
        raise


@dataclass(frozen=True)
class Loaded:
    """Content of a checkpoint without the dense part, which is already in the trainer's model and optimizer."""

    store: Store
    num_steps: int
    data_state: Mapping[str, Any] | None
    """Where the data continues on this rank; None if the data had no state."""
    extra: dict[str, Any]


def load(trainer: "Trainer", path: Path) -> Loaded:
    """Loads a checkpoint. All ranks call it. It sets the trainer's dense part only, on every rank or on none."""
    world = trainer.world
    loaded: dict[str, Any] = {}

    def read_all() -> str:
        checkpoint = folder.find_checkpoint(path)
        manifest = read_manifest(checkpoint)
        if manifest.get("format") not in (1, FORMAT):
            raise ValueError(f"format is {manifest.get('format')} in the checkpoint; this version reads 1 and {FORMAT}")
        if manifest.get("world_size") != world.size:
            num_saved = manifest.get("world_size")
            raise ValueError(f"world_size is {num_saved} in the checkpoint, {world.size} here; start {num_saved} ranks")
        check_tables(manifest, trainer.tables, trainer.seed)
        dense = read(checkpoint, "dense.pt", manifest)
        own = read(checkpoint, f"rank{world.rank}.pt", manifest)
        if manifest["format"] == 1:  # this file has rows only; the manifest has the data state
            own = {"rows": own, "data": manifest.get("data")}
        dense["model"].update(own.get("model", {}))
        check_dense(manifest, dense, trainer)
        loaded["store"] = trainer.empty_store()
        _import_rows(loaded["store"], trainer.tables, own["rows"])
        loaded["dense"], loaded["data"], loaded["num_steps"] = dense, own["data"], manifest["num_steps"]
        return content_digest(manifest)

    if len(set(agree(world, read_all, f"loading {path}"))) > 1:
        raise world.watch.agreed(
            CheckpointError(f"the ranks found different checkpoints at {path}; give a folder that all of them see")
        )
    before, was_partial = copy.deepcopy(_dense_state(trainer)), trainer.is_partially_updated
    try:
        agree(world, lambda: _set_dense_state(trainer, loaded["dense"]), f"loading {path}")
    except BaseException:
        trainer.is_partially_updated = True  # in case the next line fails
        _set_dense_state(trainer, before)  # one rank's model refused it, so no rank keeps it
        trainer.is_partially_updated = was_partial
        raise
    return Loaded(loaded["store"], loaded["num_steps"], loaded["data"], loaded["dense"].get("extra", {}))


def read_recipe(checkpoint: Path) -> tuple[str, int]:
    """Returns the recipe of the run that saved a checkpoint, as TOML, and its number of ranks."""
    try:
        manifest = read_manifest(checkpoint)
        recipe, world_size = manifest.get("recipe"), manifest["world_size"]
    except Exception as error:
        raise CheckpointError(f"loading {checkpoint} failed: {error}") from error
    if recipe is None:
        raise CheckpointError(f"{checkpoint} was saved without a recipe; load it in the program that saved it")
    return recipe, world_size


def read_whole(tables: list[Table], path: Path, num_threads: int) -> tuple[Store, dict[str, Any]]:
    """Returns one store with all ranks' rows, and the dense part, whatever the number of ranks that saved them."""
    try:
        checkpoint = folder.find_checkpoint(path)
        manifest = read_manifest(checkpoint)
        check_tables(manifest, tables, manifest["seed"])
        store = make_store(tables, manifest["seed"], num_threads)
        for rank in range(manifest["world_size"]):
            own = read(checkpoint, f"rank{rank}.pt", manifest)
            _import_rows(store, tables, own["rows"] if manifest["format"] > 1 else own)
        return store, read(checkpoint, "dense.pt", manifest)
    except Exception as error:
        raise CheckpointError(f"loading {path} failed: {type(error).__name__}: {error}") from error


def agree(world: World, work: Callable[[], str], what: str, only_rank: int | None = None) -> list[str]:
    """Runs `work` on every rank, or on one, and returns each rank's result. If it fails anywhere, all ranks raise."""
    text = ""
    if only_rank in (None, world.rank):
        try:
            with world.busy():
                text = "+" + work()
        except Exception as error:  # every rank learns of it, and raises
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            text = f"-{kind}{error}"
    texts = world.control.share_text(text)
    failures = [f"rank {rank}: {t[1:]}" for rank, t in enumerate(texts) if t.startswith("-")]
    if failures:
        raise world.watch.agreed(CheckpointError(f"{what} failed: {'; '.join(failures)}"))
    return [t[1:] for t in texts]


def _refuse_newer(newest: Path, num_steps: int) -> None:
    num_saved = read_manifest(newest)["num_steps"]
    if num_saved > num_steps:
        raise CheckpointError(
            f"{newest} is a checkpoint of {num_saved} steps, this trainer is at step {num_steps} and would replace it; "
            "load it first, save to another folder, or call save(..., replaces_newer=True)"
        )


def _buffers_and_extra_state(model: nn.Module) -> dict[str, Any]:
    """Returns buffers and extra state, which may differ by rank."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


def _dense_state(trainer: "Trainer") -> dict[str, Any]:
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    if trainer.lr_schedule is not None:
        state["lr_schedule"] = trainer.lr_schedule.state_dict()
    return state


def _set_dense_state(trainer: "Trainer", state: Mapping[str, Any]) -> str:
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.lr_schedule is not None:
        trainer.lr_schedule.load_state_dict(state["lr_schedule"])
    return ""


def _import_rows(store: Store, tables: list[Table], pieces: dict[str, Any]) -> None:
    for table in tables:
        piece = Piece(*pieces[table.name])
        store.reserve(table.name, len(piece.keys))
        store.import_piece(table.name, 0, NUM_BUCKETS, piece)
