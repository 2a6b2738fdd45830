"""Says what is in a checkpoint, or in a folder of them. Reads manifests, parts and the heads of state files only."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nestpipe.checkpoint.errors import CheckpointError, DamagedError
from nestpipe.checkpoint.folder import candidates, problem_of
from nestpipe.checkpoint.manifest import FORMAT, MANIFEST, read_manifest
from nestpipe.checkpoint.tools.saved import SavedCheckpoint, open_chain, open_checkpoint
from nestpipe.checkpoint.tools.state_view import StateView, TensorEntry

_UNFINISHED = re.compile(r"step-\d{8,}(-r\d+)?\.(partial|removed|damaged)(-?[0-9a-f]+)?")
_OLD_TABLE = re.compile(r"TableSpec\(.*dim=(\d+), state_width=(\d+), .*init=(.*), dtype=torch\.(\w+), seed=.*")
_BYTES_PER_ROW = 16
"""Key and step of a row in a shard."""


@dataclass(frozen=True)
class TableInfo:
    """A table of a checkpoint."""

    name: str
    dim: int
    dtype: str
    state_width: int
    optimizer: str | None
    """None for a frozen table."""
    init: str
    num_rows: int | None
    """Rows in this checkpoint; in one with a base, those that have changed. None for an old format."""
    num_erased: int
    """Keys that were erased since the base."""
    num_bytes: int | None


@dataclass(frozen=True)
class DenseInfo:
    """The dense part of a checkpoint."""

    num_entries: int
    """Parameters and buffers."""
    num_values: int
    num_bytes: int
    optimizer: str | None
    lr_schedule: str | None
    optimizer_bytes: int
    extra: list[str]
    """Names of the values that a program saved with the model."""


@dataclass(frozen=True)
class CheckpointInfo:
    """What is in one checkpoint."""

    path: str
    format: int
    save_id: str | None
    written: str
    """Time at which the manifest was written, by its file."""
    num_steps: int
    num_skipped: int
    num_ranks: int
    num_micro_batches: int | None
    seed: int
    bases: list[str]
    """Names of the checkpoints that this one needs, the complete one first; empty if it is complete itself."""
    tables: list[TableInfo]
    dense: DenseInfo | None
    """None for an old format, or if it cannot be read."""
    data: dict[str, Any] | None
    """Where the data continues, on rank 0; None if it has no state."""
    data_is_equal: bool
    """Whether the data continues at the same place on all ranks."""
    recipe: str | None
    num_files: int
    num_bytes: int
    """Bytes of this checkpoint, without its bases."""
    num_chain_bytes: int
    """Bytes of this checkpoint and its bases."""
    problem: str | None
    """What is wrong with names and sizes of files; None if nothing is."""


@dataclass(frozen=True)
class FolderEntry:
    """A checkpoint of a folder."""

    name: str
    num_steps: int | None
    num_ranks: int | None
    base: str | None
    num_rows: int | None
    num_bytes: int | None
    written: str | None
    is_newest_good: bool
    problem: str | None


@dataclass(frozen=True)
class FolderInfo:
    """The checkpoints of a folder, oldest first."""

    path: str
    checkpoints: list[FolderEntry]
    unfinished: list[str]
    """Folders that are being written, or were left by a killed run, or were passed over as damaged."""


def inspect(path: Path) -> CheckpointInfo | FolderInfo:
    """Returns what is in a checkpoint, or in a folder of checkpoints."""
    found = candidates(path)
    return inspect_checkpoint(found[0]) if found == [path.resolve()] else _inspect_folder(found)


def inspect_checkpoint(checkpoint: Path) -> CheckpointInfo:
    """Returns what is in one checkpoint. Raises CheckpointError if its manifest or its parts cannot be read."""
    manifest = read_manifest(checkpoint)
    if manifest["format"] in (1, 2):
        return _inspect_old(checkpoint, manifest)
    saved, problem = open_checkpoint(checkpoint, manifest), problem_of(checkpoint)
    try:
        opened = open_chain(checkpoint)
        bases = [base.path.name for base in opened[:-1]]
    except CheckpointError:
        opened, bases = [saved], [manifest["base"]["name"]]
    dense = data = None
    try:
        dense, data = _dense(saved), _data(saved)
    except DamagedError as error:
        problem = problem or str(error)
    return CheckpointInfo(
        path=str(checkpoint),
        format=manifest["format"],
        save_id=manifest["save_id"],
        written=_written(checkpoint),
        num_steps=manifest["num_steps"],
        num_skipped=manifest["num_skipped"],
        num_ranks=manifest["world_size"],
        num_micro_batches=manifest["num_micro_batches"],
        seed=manifest["seed"],
        bases=bases,
        tables=_tables(saved),
        dense=dense,
        data=data,
        data_is_equal=manifest["data_is_equal"],
        recipe=manifest["recipe"],
        num_files=len(_sizes(saved)),
        num_bytes=sum(_sizes(saved).values()),
        num_chain_bytes=sum(sum(_sizes(one).values()) for one in opened),
        problem=problem,
    )


def _tables(saved: SavedCheckpoint) -> list[TableInfo]:
    rows: Counter[str] = Counter()
    erased: Counter[str] = Counter()
    for shard in saved.shards:
        rows.update(shard.rows)
        erased.update(shard.erased)
    return [
        TableInfo(
            name=name,
            dim=layout.dim,
            dtype=str(layout.dtype).removeprefix("torch."),
            state_width=layout.state_width,
            optimizer=saved.manifest["tables"][name]["row_optimizer"],
            init=saved.manifest["tables"][name]["init"],
            num_rows=rows[name],
            num_erased=erased[name],
            num_bytes=rows[name] * (layout.record_bytes + _BYTES_PER_ROW),
        )
        for name, layout in saved.tables.items()
    ]


def _dense(saved: SavedCheckpoint) -> DenseInfo:
    view, settings = StateView(saved.dense[0]), saved.manifest["dense"] or {}
    model = _tensors(view, "model")
    return DenseInfo(
        num_entries=len({place[:1] for place in view.under("model") if place}),
        num_values=sum(entry.num_values for entry in model),
        num_bytes=sum(entry.num_bytes for entry in model),
        optimizer=settings.get("optimizer"),
        lr_schedule=settings.get("lr_schedule"),
        optimizer_bytes=sum(entry.num_bytes for entry in _tensors(view, "optimizer")),
        extra=sorted({place[0] for place in view.under("extra") if place}),
    )


def _data(saved: SavedCheckpoint) -> dict[str, Any] | None:
    state = StateView(saved.rank_states[0][0]).under("data")
    return None if state == {(): None} else {"/".join(place): _plain(value) for place, value in state.items()}


def _tensors(view: StateView, part: str) -> set[TensorEntry]:
    """Returns the tensors of a part, those that several entries share once."""
    return {entry for entry in view.under(part).values() if isinstance(entry, TensorEntry)}


def _sizes(saved: SavedCheckpoint) -> dict[str, int]:
    """Returns the size of each file, by manifest and parts."""
    sizes: dict[str, int] = {MANIFEST: (saved.path / MANIFEST).stat().st_size, **saved.manifest["sizes"]}
    for part in saved.parts:
        sizes |= {name: size for name, size in part.sizes.items() if size is not None}
    return sizes


def _inspect_folder(newest_first: list[Path]) -> FolderInfo:
    folder = newest_first[0].parent
    problems = {checkpoint: problem_of(checkpoint) for checkpoint in newest_first}
    good = next((checkpoint for checkpoint, problem in problems.items() if problem is None), None)
    unfinished = sorted(child.name for child in folder.iterdir() if _UNFINISHED.fullmatch(child.name))
    entries = [_entry(checkpoint, problems[checkpoint], checkpoint == good) for checkpoint in reversed(newest_first)]
    return FolderInfo(str(folder), entries, unfinished)


def _entry(checkpoint: Path, problem: str | None, is_newest_good: bool) -> FolderEntry:
    manifest: Mapping[str, Any] = {}
    num_rows = num_bytes = None
    try:
        manifest = read_manifest(checkpoint)
        if manifest["format"] == FORMAT:
            saved = open_checkpoint(checkpoint, manifest)
            num_rows = sum(sum(shard.rows.values()) for shard in saved.shards)
            num_bytes = sum(_sizes(saved).values())
    except (CheckpointError, OSError):
        pass  # `problem` says so
    base = manifest.get("base")
    return FolderEntry(
        name=checkpoint.name,
        num_steps=manifest.get("num_steps"),
        num_ranks=manifest.get("world_size"),
        base=None if base is None else base["name"],
        num_rows=num_rows,
        num_bytes=num_bytes,
        written=_written(checkpoint),
        is_newest_good=is_newest_good,
        problem=problem,
    )


def _inspect_old(checkpoint: Path, manifest: Mapping[str, Any]) -> CheckpointInfo:
    """Returns what the manifest of formats 1 and 2 says. The other files would have to be read as a whole."""
    names = [MANIFEST, *manifest["checksums"]]
    num_bytes = sum((checkpoint / name).stat().st_size for name in names if (checkpoint / name).is_file())
    return CheckpointInfo(
        path=str(checkpoint),
        format=manifest["format"],
        save_id=None,
        written=_written(checkpoint),
        num_steps=manifest["num_steps"],
        num_skipped=manifest.get("num_skipped", 0),
        num_ranks=manifest["world_size"],
        num_micro_batches=None,
        seed=manifest["seed"],
        bases=[],
        tables=[_old_table(name, settings) for name, settings in manifest["tables"].items()],
        dense=None,
        data=manifest.get("data"),
        data_is_equal=True,
        recipe=manifest.get("recipe"),
        num_files=len(names),
        num_bytes=num_bytes,
        num_chain_bytes=num_bytes,
        problem=problem_of(checkpoint),
    )


def _old_table(name: str, settings: str | Mapping[str, Any]) -> TableInfo:
    if isinstance(settings, Mapping):
        columns = settings["dim"], settings["dtype"].removeprefix("torch."), settings["state_width"]
        return TableInfo(name, *columns, settings["row_optimizer"], settings["init"], None, 0, None)
    found = _OLD_TABLE.fullmatch(settings)
    if found is None:
        raise CheckpointError(f"{settings} is not a table of format 1")
    dim, state_width, init, dtype = found.groups()
    return TableInfo(name, int(dim), dtype, int(state_width), "unknown", init, None, 0, None)


def _written(checkpoint: Path) -> str:
    return datetime.fromtimestamp((checkpoint / MANIFEST).stat().st_mtime).isoformat(" ", "seconds")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, TensorEntry) else value
