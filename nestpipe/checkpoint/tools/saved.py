"""A checkpoint as its manifest and its parts describe it: tables, shards and files, without their content."""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nestpipe.checkpoint.errors import CheckpointError, DamagedError
from nestpipe.checkpoint.folder import candidates, chain, newest_checkpoint
from nestpipe.checkpoint.manifest import FORMAT, Part, read_parts, state_name
from nestpipe.checkpoint.row_reader import SavedShard, saved_shards
from nestpipe.checkpoint.state_file import Written
from nestpipe.store import init
from nestpipe.store.interface import DTYPES

DENSE = "dense.safetensors"
Report = Callable[[str, float], None]
"""Takes what is being done and the share of the whole that is done, 0 to 1."""
_DTYPES = {str(dtype): dtype for dtype in DTYPES}
_INITS = {kind.__name__: kind for kind in (init.Constant, init.Uniform, init.Normal, init.TruncatedNormal)}


@dataclass(frozen=True)
class TableLayout:
    """Columns of the records of a table."""

    dim: int
    state_width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    @property
    def record_bytes(self) -> int:
        return (self.dim + self.state_width) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A shard, and the numbers of its rows and erased keys by table."""

    file: SavedShard
    rows: Mapping[str, int]
    erased: Mapping[str, int]

    @property
    def num_keys(self) -> int:
        return sum(self.rows.values()) + sum(self.erased.values())


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint without its bases."""

    path: Path
    manifest: Mapping[str, Any]
    parts: Sequence[Part]

    @cached_property
    def tables(self) -> dict[str, TableLayout]:
        """Returns the layout of each table, in the order of the tables' numbers."""
        return {
            name: TableLayout(settings["dim"], settings["state_width"], _DTYPES[settings["dtype"]])
            for name, settings in self.manifest["tables"].items()
        }

    @cached_property
    def shards(self) -> list[Shard]:
        names = list(self.tables)

        def by_table(counts: Mapping[str, int]) -> dict[str, int]:
            return {names[int(number)]: count for number, count in counts.items()}

        files = saved_shards(self.path, [part.content for part in self.parts], self.manifest["save_id"])
        described = (shard for part in self.parts for shard in part.content["shards"].values())
        return [
            Shard(file, by_table(shard["rows"]), by_table(shard["erased"]))
            for file, shard in zip(files, described, strict=True)
        ]

    @property
    def dense(self) -> tuple[Path, Written]:
        """Returns the file of the dense part, with its checksum and size."""
        return self.path / DENSE, Written(self.manifest["checksums"][DENSE], self.manifest["sizes"][DENSE])

    @property
    def rank_states(self) -> list[tuple[Path, Written]]:
        """Returns the files of what ranks have of their own, with checksums and sizes."""
        return [(self.path / state_name(part.rank), Written(*part.content["state"])) for part in self.parts]


def open_checkpoint(path: Path, manifest: Mapping[str, Any]) -> SavedCheckpoint:
    """Returns one checkpoint. Reads its parts.

    Raises CheckpointError for the formats of version 0.1 and an early 0.2, whose rows can only be read all at once.
    """
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')}, but this needs format {FORMAT}. Resume its run once, or load "
            "the checkpoint and save it again: that writes the present format"
        )
    try:
        saved = SavedCheckpoint(path, manifest, list(read_parts(path, manifest)))
        _ = saved.tables, saved.shards, saved.dense, saved.rank_states
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DamagedError(f"{path}: the manifest or a rank's part makes no sense: {error!r}") from None
    return saved


def open_chain(checkpoint: Path) -> list[SavedCheckpoint]:
    """Returns a checkpoint behind its bases, the complete one first."""
    return [open_checkpoint(path, manifest) for path, manifest in chain(checkpoint)]


def newest(path: Path) -> tuple[Path, list[str]]:
    """Returns the newest checkpoint at a path whose files have the right sizes, and what is wrong with newer ones."""
    found = candidates(path)
    if found == [path.resolve()]:
        return found[0], []
    checkpoint, problems = newest_checkpoint(found[0].parent)
    assert checkpoint is not None
    return checkpoint, problems


def parse_init(text: str) -> init.Distribution:
    """Returns the distribution of initial rows that a manifest names, such as "Normal(std=0.02, mean=0.0)"."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("it is not a name with keywords")
        values = {str(keyword.arg): float(ast.literal_eval(keyword.value)) for keyword in call.keywords}
        return _INITS[call.func.id](**values)
    except (SyntaxError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{text!r} is not a distribution of initial rows: {error}") from None
