"""Compares two checkpoints: settings, tables, rows, the dense part, the data's position, the recipe.

Rows are compared by ranges of buckets. Those of one side are in memory, a range at a time; those of the other pass by.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.checkpoint.tools.row_stream import Rows, RowStream, find, select, split_buckets
from nestpipe.checkpoint.tools.saved import Report, SavedCheckpoint, TableLayout, open_chain
from nestpipe.checkpoint.tools.state_view import StateView, TensorEntry

PIECE_BYTES = 64 << 20
"""Rows of the first checkpoint that are in memory at a time."""
_SETTINGS = ("num_steps", "num_skipped", "seed", "num_micro_batches", "world_size", "hosts")
_NOT_CONTENT = ("world_size", "num_micro_batches", "hosts")


@dataclass(frozen=True)
class Difference:
    """A value that differs."""

    what: str
    first: str
    second: str
    is_content: bool = True
    """False for what does not change how training goes on."""
    largest: float | None = None
    """Largest absolute difference of a tensor's values; None for other values."""


@dataclass
class TableDifference:
    """How the rows of a table differ. Bits are compared."""

    name: str
    num_rows: tuple[int, int] = (0, 0)
    num_added: int = 0
    """Keys that only the second checkpoint has."""
    num_removed: int = 0
    """Keys that only the first one has."""
    num_changed: int = 0
    """Rows that differ."""
    num_state_changed: int = 0
    """Equal rows whose row state or step differs."""
    largest: float | None = 0.0
    """Largest absolute difference of rows; None if they cannot be compared, inf if one is not finite."""

    @property
    def is_equal(self) -> bool:
        return not (self.num_added or self.num_removed or self.num_changed or self.num_state_changed)


@dataclass
class CheckpointDifference:
    """How two checkpoints differ."""

    first: Path
    second: Path
    settings: list[Difference] = field(default_factory=list)
    tables_added: list[str] = field(default_factory=list)
    tables_removed: list[str] = field(default_factory=list)
    tables: list[TableDifference] = field(default_factory=list)
    """Tables that both have, equal ones included."""
    dense: list[Difference] = field(default_factory=list)
    recipe: list[Difference] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        values = (*self.settings, *self.dense, *self.recipe)
        has_same_tables = not (self.tables_added or self.tables_removed)
        return has_same_tables and all(t.is_equal for t in self.tables) and not any(v.is_content for v in values)


def diff(
    first: Path,
    second: Path,
    is_free: Callable[[str], bool] = lambda key: False,
    report: Report = lambda what, share: None,
) -> CheckpointDifference:
    """Compares two checkpoints, whatever their numbers of ranks. Raises CheckpointError if one cannot be read.

    is_free: whether a key of the recipe may differ without changing the result.
    """
    chains = open_chain(first), open_chain(second)
    a, b = chains[0][-1], chains[1][-1]
    result = CheckpointDifference(first, second)
    result.settings = [*_settings(a, b), *_rank_states(a, b, "data"), *_table_settings(a, b)]
    result.tables_added = [name for name in b.tables if name not in a.tables]
    result.tables_removed = [name for name in a.tables if name not in b.tables]
    result.dense = [*_states("", StateView(*a.dense), StateView(*b.dense)), *_rank_states(a, b, "model")]
    result.recipe = list(_recipes(a, b, is_free))
    result.tables = _Comparison(*chains, report).compare()
    return result


def _settings(a: SavedCheckpoint, b: SavedCheckpoint) -> Iterator[Difference]:
    for name in _SETTINGS:
        values = str(a.manifest.get(name)), str(b.manifest.get(name))
        if values[0] != values[1]:
            yield Difference(name, *values, is_content=name not in _NOT_CONTENT)


def _table_settings(a: SavedCheckpoint, b: SavedCheckpoint) -> Iterator[Difference]:
    for table in a.tables:
        first, second = a.manifest["tables"][table], b.manifest["tables"].get(table)
        for name in first if second is not None else ():
            if first[name] != second.get(name):
                yield Difference(f"table {table}: {name}", str(first[name]), str(second.get(name)))


def _states(label: str, a: StateView, b: StateView, *part: str) -> Iterator[Difference]:
    """Compares the values of two state files, or of one part of them. Tensors are read one after the other."""
    first, second = a.under(*part), b.under(*part)
    for place in dict.fromkeys([*first, *second]):
        name = label + "/".join([*part, *place])
        values = first.get(place, "not there"), second.get(place, "not there")
        largest = None
        if all(isinstance(value, TensorEntry) for value in values) and _same_form(*values):
            tensors = a.tensor(values[0]), b.tensor(values[1])
            if _same_bits(*tensors):
                continue
            largest = _largest(*tensors)
        elif values[0] == values[1] and type(values[0]) is type(values[1]):
            continue
        yield Difference(name, str(values[0]), str(values[1]), largest=largest)


def _rank_states(a: SavedCheckpoint, b: SavedCheckpoint, part: str) -> Iterator[Difference]:
    """Compares what ranks have of their own: "data", the position of the data, or "model", buffers that differ by rank.

    The state of random generators is not compared, since each micro-batch sets its own. Checkpoints of different
    numbers of ranks have only a position in common, if all ranks had the same.
    """
    is_same_size = len(a.parts) == len(b.parts)
    has_position = part == "data" and a.manifest["data_is_equal"] and b.manifest["data_is_equal"]
    for rank in range(len(a.parts)) if is_same_size else range(int(has_position)):
        label = f"rank {rank}: " if is_same_size and len(a.parts) > 1 else ""
        yield from _states(label, StateView(*a.rank_states[rank]), StateView(*b.rank_states[rank]), part)


def _same_form(a: TensorEntry, b: TensorEntry) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    first, second = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)


def _largest(a: Tensor, b: Tensor) -> float:
    """Returns the largest absolute difference, inf if a value on one side only is not finite."""
    kind = torch.complex128 if a.is_complex() else torch.float64
    first, second = a.to(kind), b.to(kind)
    is_same = (first == second) | (first.isnan() & second.isnan())
    distance = torch.where(is_same, 0.0, (first - second).abs())
    largest = float(distance.max()) if distance.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def _recipes(a: SavedCheckpoint, b: SavedCheckpoint, is_free: Callable[[str], bool]) -> Iterator[Difference]:
    texts = a.manifest["recipe"], b.manifest["recipe"]
    if None in texts:
        if texts[0] != texts[1]:
            first, second = ("none" if text is None else "saved" for text in texts)
            yield Difference("recipe", first, second, is_content=False)
        return
    keys = [dict(_flat("", tomllib.loads(text))) for text in texts]
    global_batches = [
        recipe.get("train.batch_size", 0) * len(side.parts) for recipe, side in zip(keys, (a, b), strict=True)
    ]
    for key in dict.fromkeys([*keys[0], *keys[1]]):
        value, other = (str(recipe.get(key, "not set")) for recipe in keys)
        if value != other:
            is_same_batch = key == "train.batch_size" and global_batches[0] == global_batches[1]
            yield Difference(key, value, other, is_content=not is_free(key) and not is_same_batch)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Returns the keys of a recipe. Tables in a list are named by their `name`."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, entry)
    elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        for i, entry in enumerate(value):
            yield from _flat(f"{prefix}.{entry.get('name', i)}", entry)
    else:
        yield prefix, value


class _Comparison:
    """Compares the rows of the tables that two checkpoints have in common."""

    def __init__(self, a: Sequence[SavedCheckpoint], b: Sequence[SavedCheckpoint], report: Report) -> None:
        self._chains = a, b
        self._layouts = {
            name: (a[-1].tables[name], b[-1].tables[name]) for name in a[-1].tables if name in b[-1].tables
        }
        self._tables = {name: TableDifference(name) for name in self._layouts}
        self._ranges = split_buckets([s for one in a for s in one.shards], lambda s: s.file.num_bytes, PIECE_BYTES)
        self._report = report
        self._num_read, self._num_bytes = 0, sum(shard.file.num_bytes for one in (*a, *b) for shard in one.shards)

    def compare(self) -> list[TableDifference]:
        for buckets in self._ranges:
            first = self._collect(buckets)
            num_found = dict.fromkeys(self._tables, 0)
            for rows in RowStream(self._chains[1], self._after_block).rows(buckets):
                if rows.table in self._tables:
                    num_found[rows.table] += self._match(first.get(rows.table), rows)
            for name, table in self._tables.items():
                num_first = len(first[name].keys) if name in first else 0
                table.num_rows = table.num_rows[0] + num_first, table.num_rows[1]
                table.num_removed += num_first - num_found[name]
        return list(self._tables.values())

    def _after_block(self, num_bytes: int) -> None:
        """Reports progress. A shard that lies in several ranges is read for each of them, which shows as 100%."""
        self._num_read += num_bytes
        self._report("rows", min(self._num_read / self._num_bytes, 1.0))

    def _collect(self, buckets: range) -> dict[str, "_SortedRows"]:
        """Returns the rows of the first checkpoint in a range."""
        pieces: dict[str, list[Rows]] = {}
        for rows in RowStream(self._chains[0], self._after_block).rows(buckets):
            if rows.table in self._tables and len(rows.keys) > 0:
                pieces.setdefault(rows.table, []).append(rows)
        return {table: _SortedRows(pieces.pop(table)) for table in list(pieces)}

    def _match(self, first: "_SortedRows | None", rows: Rows) -> int:
        """Compares rows of the second checkpoint with those of the first. Returns the number of keys in both."""
        table = self._tables[rows.table]
        table.num_rows = table.num_rows[0], table.num_rows[1] + len(rows.keys)
        before, is_found = (None, None) if first is None else first.find(rows.keys)
        num_found = 0 if before is None else len(before.keys)
        table.num_added += len(rows.keys) - num_found
        if before is not None and is_found is not None and num_found > 0:
            _compare(table, before, select(rows, is_found), *self._layouts[rows.table])
        return num_found


class _SortedRows:
    """Rows of one table that can be found by key."""

    def __init__(self, parts: list[Rows]) -> None:
        keys = torch.cat([rows.keys for rows in parts])
        self._order = torch.from_numpy(np.argsort(keys.numpy()))
        self.keys = keys[self._order]
        self._rows = Rows(
            parts[0].table, keys, *(torch.cat(arrays) for arrays in zip(*(rows[2:] for rows in parts), strict=True))
        )

    def find(self, keys: Tensor) -> tuple[Rows, Tensor]:
        """Returns the rows of those keys that are there, and which these are."""
        places, is_found = find(self.keys, keys)
        index = self._order[places]
        return Rows(self._rows.table, *(array.index_select(0, index) for array in self._rows[1:])), is_found


def _compare(table: TableDifference, before: Rows, after: Rows, first: TableLayout, second: TableLayout) -> None:
    """Compares the records of the same keys."""
    if (first.dim, first.dtype) != (second.dim, second.dtype):
        table.num_changed += len(before.steps)
        table.largest = None
        return
    if torch.equal(before.records, after.records) and torch.equal(before.steps, after.steps):
        return
    rows = before.records[:, : first.row_bytes], after.records[:, : first.row_bytes]
    is_changed = (rows[0] != rows[1]).any(1)
    is_other = before.steps != after.steps
    if first.state_width == second.state_width:
        is_other |= (before.records[:, first.row_bytes :] != after.records[:, first.row_bytes :]).any(1)
    table.num_changed += int(is_changed.sum())
    table.num_state_changed += int((is_other & ~is_changed).sum())
    if bool(is_changed.any()) and table.largest is not None:
        changed = [side[is_changed].contiguous().view(first.dtype) for side in rows]
        table.largest = max(table.largest, _largest(*changed))
