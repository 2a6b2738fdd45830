"""Loads a checkpoint, at any world size. Everything is read and checked before anything changes."""

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import warn

from nestpipe.checkpoint import folder
from nestpipe.checkpoint.agree import agree
from nestpipe.checkpoint.errors import CheckpointError, DamagedError, LeftHalfwayError
from nestpipe.checkpoint.manifest import FORMAT, num_shards_of, read_manifest, read_part, state_name
from nestpipe.checkpoint.match import check_dense, check_tables
from nestpipe.checkpoint.old import read_old_dense, read_old_rank
from nestpipe.checkpoint.partial import LoadReport, fitting_columns, fitting_dense, whole_columns
from nestpipe.checkpoint.row_reader import RowReader, saved_shards
from nestpipe.checkpoint.save import DENSE
from nestpipe.checkpoint.state_file import Written, read_state
from nestpipe.checkpoint.subject import Subject, load_random_state
from nestpipe.distributed.world import World
from nestpipe.embedding.table import Table
from nestpipe.store import Store


@dataclass(frozen=True)
class Loaded:
    """Content of a checkpoint without the dense part, which is in the subject's model and optimizer already."""

    checkpoint: Path
    store: Store
    num_steps: int
    num_skipped: int
    data_state: Mapping[str, Any] | None
    """Where the data continues on this rank; None if the data had no state."""
    extra: dict[str, Any]
    report: LoadReport
    damaged: tuple[folder.DamagedCheckpoint, ...]
    """Newer checkpoints that are damaged."""
    problems: tuple[str, ...]
    """What is wrong with them."""
    num_row_bytes: int
    """Bytes of the shards that this rank has read."""
    places: dict[str, Any]
    """Choices of a Trainer for what is "auto"; none of version 0.2."""


@dataclass
class _Read:
    """One checkpoint, read and checked."""

    manifest: dict[str, Any]
    store: Store
    dense: dict[str, Any]
    own: dict[str, Any]
    report: LoadReport
    num_row_bytes: int


def load(subject: Subject, new_store: Callable[[], Store], path: Path, strict: bool = True) -> Loaded:
    """Loads the newest good checkpoint at a path. All ranks call it. It sets the subject's dense part, on every rank or
    on none.

    strict: refuses tables and a dense part that differ from those that were saved; otherwise takes what fits.
    """
    world, what = subject.world, f"loading {path}"
    found: dict[str, Any] = {}

    def find() -> str:
        found["paths"] = folder.candidates(path)
        return json.dumps([candidate.name for candidate in found["paths"]])

    lists = [json.loads(text) for text in agree(world, find, what)]
    if len({names[0] for names in lists}) > 1:
        raise world.watch.agreed(_different(path))
    # Rank 0 may be removing older ones, so its list is the one that counts.
    paths = [found["paths"][0].parent / name for name in lists[0]]
    problems: list[str] = []
    for number, checkpoint in enumerate(paths):

        def read(checkpoint: Path = checkpoint) -> str:
            found["read"] = _read(checkpoint, subject, new_store(), strict)
            return hashlib.sha256(json.dumps(found["read"].manifest, sort_keys=True).encode()).hexdigest()

        try:
            is_same = len(set(agree(world, read, what))) == 1
        except DamagedError as error:
            problems.append(str(error))
            if number + 1 == len(paths):
                raise _all_damaged(path, problems, error) from None
            continue
        if not is_same:
            raise world.watch.agreed(_different(path))
        _set_dense(subject, found["read"], what)
        damaged = tuple(map(folder.DamagedCheckpoint.at, paths[:number]))
        return _loaded(checkpoint, found["read"], subject, damaged, tuple(problems))
    raise AssertionError("candidates returns at least one")


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


def read_whole(tables: Sequence[Table], path: Path, new_store: Callable[[int], Store]) -> tuple[Store, dict[str, Any]]:
    """Returns one store with all ranks' rows, and the dense part. new_store: makes a store, given the run's seed."""
    problems: list[str] = []
    try:
        for checkpoint in folder.candidates(path):
            try:
                manifest = read_manifest(checkpoint)
                check_tables(manifest, tables, manifest["seed"])
                store = new_store(manifest["seed"])
                if manifest["format"] != FORMAT:
                    read_old_rank(checkpoint, manifest, store, [table.name for table in tables], 0, 1)
                    return store, read_old_dense(checkpoint, manifest)
                specs = {table.name: store.spec(table.name) for table in tables}
                _read_rows(checkpoint, RowReader(store, whole_columns(list(manifest["tables"]), specs), 0, 1), 0, 1)
                return store, _read_dense(checkpoint, manifest)
            except DamagedError as error:
                problems.append(str(error))
        raise DamagedError("; ".join(problems))
    except Exception as error:
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        raise CheckpointError(f"loading {path} failed: {kind}{error}") from error


def _read(checkpoint: Path, subject: Subject, store: Store, strict: bool) -> _Read:
    """Reads a checkpoint for one rank."""
    world, manifest, report = subject.world, read_manifest(checkpoint), LoadReport()
    if manifest.get("format") not in (1, 2, FORMAT):
        raise ValueError(f"format is {manifest.get('format')} in the checkpoint; this version reads 1 to {FORMAT}")
    is_old, names = manifest["format"] != FORMAT, [table.name for table in subject.tables]
    if strict or is_old:
        check_tables(manifest, subject.tables, subject.seed)
    dense = read_old_dense(checkpoint, manifest) if is_old else _read_dense(checkpoint, manifest)
    if is_old:
        if world.mesh.num_replicas > 1:
            raise ValueError(
                f"format {manifest['format']} cannot be loaded with exchange.replicas = {world.mesh.num_replicas}; "
                "load and save it once without replicas"
            )
        own, data_is_equal = read_old_rank(checkpoint, manifest, store, names, world.rank, world.size)
        if manifest["world_size"] != world.size:
            own = _position(own, data_is_equal, manifest, world.size, strict)
        num_bytes = 0
    else:
        if strict:
            columns = whole_columns(list(manifest["tables"]), {name: store.spec(name) for name in names})
        else:
            columns = fitting_columns(manifest["tables"], subject.tables, subject.seed, report)
        shard = world.mesh.shard, world.mesh.num_shards
        reader = RowReader(store, columns, *shard)
        _read_rows(checkpoint, reader, *shard)
        own, num_bytes = _read_own(checkpoint, manifest, world.rank, world.size, strict), reader.num_bytes
    if manifest["world_size"] == world.size:
        dense.setdefault("model", {}).update(own.get("model", {}))
    if not dense.get("model"):
        dense.pop("model", None)
    if strict:
        check_dense(manifest, dense, subject)
    else:
        dense = {**fitting_dense(dense, manifest, subject, report), "extra": dense.get("extra", {})}
    return _Read(manifest, store, dense, own, report, num_bytes)


def _read_dense(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    return _read_state(checkpoint / DENSE, Written(manifest["checksums"].get(DENSE), manifest["sizes"].get(DENSE)))


def _read_own(checkpoint: Path, manifest: Mapping[str, Any], rank: int, size: int, strict: bool) -> dict[str, Any]:
    """Returns what the rank had of its own. At another world size there is only the state of the data, if all ranks had
    the same."""
    saved_rank = rank if manifest["world_size"] == size else 0
    part = read_part(checkpoint, manifest, saved_rank)
    own = _read_state(checkpoint / state_name(saved_rank), Written(*part.content["state"]))
    if manifest["world_size"] == size:
        return own
    return _position(own, manifest["data_is_equal"], manifest, size, strict)


def _position(
    own: Mapping[str, Any], data_is_equal: bool, manifest: Mapping[str, Any], size: int, strict: bool
) -> dict[str, Any]:
    """Returns where the data continues at another world size, given what rank 0 had of its own."""
    if not data_is_equal and strict:
        raise ValueError(
            f"the checkpoint was saved by {manifest['world_size']} ranks, each with a data position of its own, which "
            f"{size} ranks cannot continue; start {manifest['world_size']} ranks, or load with strict=False and set "
            "the position of the data yourself"
        )
    return {"data": own["data"] if data_is_equal else None}


def _read_state(file: Path, expected: Written) -> dict[str, Any]:
    try:
        state = read_state(file, expected)
    except (OSError, ValueError) as error:
        raise DamagedError(str(error)) from None
    if not isinstance(state, dict):
        raise DamagedError(f"{file} does not hold what it should")
    return state


def _read_rows(checkpoint: Path, reader: RowReader, shard: int, num_shards: int) -> None:
    """Reads the rows of a shard of a checkpoint and of its bases, those of the complete one first."""
    for path, manifest in folder.chain(checkpoint):
        num_saved = num_shards_of(manifest)
        with_own_buckets = range(shard * num_saved // num_shards, -(-(shard + 1) * num_saved // num_shards))
        parts = [read_part(path, manifest, saved_rank).content for saved_rank in with_own_buckets]
        reader.read(saved_shards(path, parts, manifest["save_id"]))


def _set_dense(subject: Subject, read: _Read, what: str) -> None:
    """Sets the dense part. If one rank's model refuses it, no rank keeps it."""
    before = copy.deepcopy(subject.dense_state())

    def set_dense() -> str:
        subject.load_dense_state(read.dense)
        return ""

    try:
        agree(subject.world, set_dense, what)
    except CheckpointError as error:
        try:
            subject.load_dense_state(before)
        except Exception as second:
            raise LeftHalfwayError(f"{error}; what was there before could not be restored: {second}") from error
        raise


def _loaded(
    checkpoint: Path,
    read: _Read,
    subject: Subject,
    damaged: tuple[folder.DamagedCheckpoint, ...],
    problems: tuple[str, ...],
) -> Loaded:
    if "random" in read.own and read.manifest["world_size"] == subject.world.size:
        load_random_state(read.own["random"], subject.world.device)
        _say_if_rounded(checkpoint, read.manifest.get("hosts"), subject.world)
    return Loaded(
        checkpoint,
        read.store,
        read.manifest["num_steps"],
        read.manifest.get("num_skipped", 0),
        read.own.get("data"),
        read.dense.get("extra", {}),
        read.report,
        damaged,
        problems,
        read.num_row_bytes,
        read.manifest.get("places", {}),
    )


def _say_if_rounded(checkpoint: Path, saved: str | None, world: World) -> None:
    """Says on rank 0 if gradients are added in another order than before the save."""
    current = None if world.host_map is None else str(world.host_map)
    if saved != current and world.rank == 0:
        ways = ["in one hop" if hosts is None else f"in two hops, with hosts {hosts}" for hosts in (saved, current)]
        warn(
            f"{checkpoint} was trained {ways[0]}, and goes on {ways[1]}: gradients are added in another order, so the "
            "result is that of an uninterrupted run up to rounding only",
            stacklevel=2,
        )


def _different(path: Path) -> CheckpointError:
    return CheckpointError(f"the ranks found different checkpoints at {path}; give a folder that all of them see")


def _all_damaged(path: Path, problems: Sequence[str], error: CheckpointError) -> CheckpointError:
    if len(problems) == 1:
        return error
    return DamagedError(f"every checkpoint in {path} is damaged: {'; '.join(problems)}")
