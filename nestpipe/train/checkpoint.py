"""Saving and loading a Trainer: complete, checked, and never half there.

A checkpoint is a folder: `rank<r>.pt` with the rows each rank owns, `dense.pt` with the model and its optimizer, and
`manifest.json`, written last, with a checksum of each. It is written beside its place and then renamed, so that a save
that fails leaves the one before it as it was.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nestpipe.distributed.world import World
from nestpipe.embedding.table import Table
from nestpipe.pipelining.pipeline import make_store
from nestpipe.store import NUM_BUCKETS, HostStore, Piece

if TYPE_CHECKING:
    from nestpipe.train.trainer import Trainer

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text says which file and why."""


def save(trainer: "Trainer", path: Path) -> None:
    """All ranks call it, with a path that all of them see."""
    world, staging, previous = trainer.world, _beside(path, "partial"), _beside(path, "previous")

    def make_folder() -> str:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return ""

    def write_rows() -> str:
        pieces = {t.name: tuple(trainer.store.export_piece(t.name, 0, NUM_BUCKETS)) for t in trainer.tables}
        return _write(staging / f"rank{world.rank}.pt", pieces)

    def write_rest() -> str:
        dense = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        if trainer.lr_schedule is not None:
            dense["lr_schedule"] = trainer.lr_schedule.state_dict()
        checksums = {f"rank{rank}.pt": checksum for rank, checksum in enumerate(row_checksums)}
        checksums["dense.pt"] = _write(staging / "dense.pt", dense)
        manifest = _description(trainer.tables, trainer.seed, world)
        manifest |= {"num_steps": trainer.num_steps, "seed": trainer.seed, "recipe": trainer.recipe}
        if trainer.data_state is not None:
            manifest["data"] = dict(trainer.data_state())
        (staging / "manifest.json").write_text(json.dumps(manifest | {"checksums": checksums}, indent=2))
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            path.rename(previous)
        staging.rename(path)
        shutil.rmtree(previous, ignore_errors=True)
        return ""

    try:
        _agree(world, make_folder, f"saving to {path}", only_rank=0)
        row_checksums = _agree(world, write_rows, f"saving to {path}")
        _agree(world, write_rest, f"saving to {path}", only_rank=0)
    except CheckpointError:
        if world.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def load(trainer: "Trainer", path: Path) -> None:
    """All ranks call it. The trainer is changed only when every rank could read everything."""
    world = trainer.world
    loaded: dict[str, Any] = {}

    def read() -> str:
        manifest = _read_manifest(path)
        expected = _description(trainer.tables, trainer.seed, world)
        for name, value in expected.items():
            if manifest.get(name) != value:
                raise ValueError(f"{name} is {manifest.get(name)} in the checkpoint, {value} in this trainer")
        loaded["num_steps"] = manifest["num_steps"]
        loaded["dense"] = _read(path, "dense.pt", manifest)
        if ("lr_schedule" in loaded["dense"]) != (trainer.lr_schedule is not None):
            raise ValueError("only one of the checkpoint and this trainer has a schedule of the dense learning rate")
        loaded["store"] = make_store(trainer.tables, trainer.seed, trainer.store.num_threads)
        _import_rows(loaded["store"], trainer.tables, _read(path, f"rank{world.rank}.pt", manifest))
        return ""

    _agree(world, read, f"loading {path}")
    trainer.model.load_state_dict(loaded["dense"]["model"])
    trainer.optimizer.load_state_dict(loaded["dense"]["optimizer"])
    if trainer.lr_schedule is not None:
        trainer.lr_schedule.load_state_dict(loaded["dense"]["lr_schedule"])
    trainer.store = loaded["store"]
    trainer.num_steps = loaded["num_steps"]


def find_checkpoint(path: Path) -> Path:
    """This folder, or the one checkpoint in it."""
    if not path.exists():
        raise CheckpointError(f"there is no folder {path}; give the checkpoint.dir of a run")
    if (path / "manifest.json").exists() or not path.is_dir():
        return path
    inside = sorted(file.parent for file in path.glob("*/manifest.json"))
    if len(inside) > 1:
        raise CheckpointError(f"{path} holds several checkpoints, {', '.join(map(str, inside))}; name one of them")
    return inside[0] if inside else path


def read_recipe(path: Path) -> tuple[str, int]:
    """The recipe of the run that saved a checkpoint, as TOML, and the number of its ranks."""
    try:
        manifest = _read_manifest(path)
        recipe, world_size = manifest.get("recipe"), manifest["world_size"]
    except Exception as error:
        raise CheckpointError(f"loading {path} failed: {error}") from error
    if recipe is None:
        raise CheckpointError(f"{path} was saved without a recipe, by a program of its own; evaluate it from there")
    return recipe, world_size


def read_data_state(path: Path) -> dict[str, Any] | None:
    """Of the data after the last trained batch; None: it was not saved with the model."""
    try:
        state = _read_manifest(path).get("data")
        if state is not None and not isinstance(state, dict):
            raise ValueError(f"the state of data in {path / 'manifest.json'} is {state!r}, no mapping")
        return state
    except Exception as error:
        raise CheckpointError(f"loading {path} failed: {error}") from error


def read_whole(tables: list[Table], path: Path, num_threads: int) -> tuple[HostStore, dict[str, Any]]:
    """All ranks' rows in one store, and the dense part; for one process, whatever the number of ranks that saved."""
    try:
        manifest = _read_manifest(path)
        expected = _specs(tables, manifest["seed"])
        if manifest["tables"] != expected:
            raise ValueError(f"tables are {manifest['tables']} in the checkpoint, {expected} here")
        store = make_store(tables, manifest["seed"], num_threads)
        for rank in range(manifest["world_size"]):
            _import_rows(store, tables, _read(path, f"rank{rank}.pt", manifest))
        return store, _read(path, "dense.pt", manifest)
    except Exception as error:
        raise CheckpointError(f"loading {path} failed: {type(error).__name__}: {error}") from error


def _agree(world: World, work: Callable[[], str], what: str, only_rank: int | None = None) -> list[str]:
    """Runs it on every rank, or on one; if it fails anywhere, all ranks raise. Returns what each rank returned."""
    text = ""
    if only_rank in (None, world.rank):
        try:
            with world.busy():
                text = "+" + work()
        except Exception as error:  # told to every rank, and raised on each of them
            text = f"-{type(error).__name__}: {error}"
    texts = world.control.share_text(text)
    failures = [f"rank {rank}: {t[1:]}" for rank, t in enumerate(texts) if t.startswith("-")]
    if failures:
        raise world.watch.agreed(CheckpointError(f"{what} failed: {'; '.join(failures)}"))
    return [t[1:] for t in texts]


def _description(tables: list[Table], seed: int, world: World) -> dict[str, Any]:
    """What must be the same for an exact continuation."""
    return {"format": FORMAT, "world_size": world.size, "tables": _specs(tables, seed)}


def _specs(tables: list[Table], seed: int) -> dict[str, str]:
    return {table.name: repr(table.spec(seed)) for table in tables}


def _import_rows(store: HostStore, tables: list[Table], pieces: dict[str, Any]) -> None:
    for table in tables:
        piece = Piece(*pieces[table.name])
        store.reserve(table.name, len(piece.keys))
        store.import_piece(table.name, 0, NUM_BUCKETS, piece)


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f"{path.name}.{word}")


def _write(file: Path, content: object) -> str:
    torch.save(content, file)
    return _checksum(file)


def _read(path: Path, name: str, manifest: dict[str, Any]) -> Any:
    file = path / name
    if _checksum(file) != manifest["checksums"].get(name):
        raise ValueError(f"{file} is damaged or of another save: its checksum is not that of the manifest")
    return torch.load(file, map_location="cpu", weights_only=True)  # whatever device it was saved on


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    if not file.exists():
        hint = f"; {_beside(path, 'previous')} holds the save before it" if _beside(path, "previous").exists() else ""
        raise FileNotFoundError(f"{file} does not exist: {path} is no complete checkpoint{hint}")
    manifest = json.loads(file.read_text())
    if not isinstance(manifest, dict) or "checksums" not in manifest:
        raise ValueError(f"{file} is not the manifest of a checkpoint")
    return manifest


def _checksum(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
