"""Exports a checkpoint for other programs: rows to Parquet, dense weights to safetensors, settings to JSON.

Records pass through block by block. At most PIECE_BYTES of rows wait for their row group to be written.
"""

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import sync_folder, write_synced
from nestpipe.checkpoint.tools.row_stream import Rows, RowStream, split_buckets
from nestpipe.checkpoint.tools.saved import Report, SavedCheckpoint, TableLayout, open_chain, parse_init
from nestpipe.checkpoint.tools.state_view import StateView, TensorEntry
from nestpipe.store import init

VERSION = 1
SETTINGS, DENSE = "model.json", "dense.safetensors"
PIECE_BYTES = 32 << 20
"""Most bytes of the keys of a range of buckets, and of rows that wait to be written."""
FILE_BYTES = 1 << 30
"""Bytes of rows at which a table's next file begins."""
_PLAIN_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)


def export(
    checkpoint: Path, out: Path, with_state: bool = False, report: Report = lambda what, share: None
) -> dict[str, Any]:
    """Exports a checkpoint to a folder, which must be new or empty. Returns the content of its model.json.

    The folder appears once everything is on disk. with_state: adds the row state and the step of each row.
    """
    chain = open_chain(checkpoint)
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty folder; nothing in it was touched. Name a new one")
    staging = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
    try:
        staging.mkdir(parents=True)
        settings = _write_files(chain, staging, with_state, report)
        if out.exists():
            out.rmdir()
        staging.rename(out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return settings


def _write_files(chain: Sequence[SavedCheckpoint], folder: Path, with_state: bool, report: Report) -> dict[str, Any]:
    saved, manifest = chain[-1], chain[-1].manifest
    left_out = _write_dense(saved, folder / DENSE)
    tables = _write_rows(chain, folder, with_state, report)
    settings = {
        "version": VERSION,
        "checkpoint": saved.path.name,
        "save_id": manifest["save_id"],
        "steps": manifest["num_steps"],
        "dense": DENSE,
        "left_out_of_dense": left_out,
        "tables": {name: _describe(saved, name) | table.described for name, table in tables.items()},
        "recipe": manifest["recipe"],
    }
    write_synced(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")
    for inside in (*(child for child in folder.iterdir() if child.is_dir()), folder):
        sync_folder(inside)
    return settings


def _describe(saved: SavedCheckpoint, table: str) -> dict[str, Any]:
    settings, layout = saved.manifest["tables"][table], saved.tables[table]
    distribution = parse_init(settings["init"])
    return {
        "dim": layout.dim,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "init": {"kind": type(distribution).__name__, **asdict(distribution)},
        "initial_mean": _mean(distribution),
        "seed": settings["seed"],
    }


def _mean(distribution: init.Distribution) -> float:
    """Returns the mean of initial rows, which a server may give to keys that it does not know."""
    if isinstance(distribution, init.Constant):
        return distribution.value
    if isinstance(distribution, init.Uniform):
        return (distribution.low + distribution.high) / 2
    return distribution.mean


def _write_dense(saved: SavedCheckpoint, file: Path) -> list[str]:
    """Writes the model's parameters and buffers under the names of its state_dict. Returns the names of the rest."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    view = StateView(*saved.dense)
    tensors: dict[str, Tensor] = {}
    left_out = []
    for place, entry in view.under("model").items():
        if len(place) == 1 and isinstance(entry, TensorEntry) and not entry.dtype.startswith("complex"):
            tensors[place[0]] = view.tensor(entry).clone()  # tied weights are written twice: each name has its tensor
        elif place:
            left_out.append("/".join(place))
    try:
        file.touch()
        mode = stat.S_IMODE(file.stat().st_mode)
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(mode)  # safetensors puts a temporary file in its place, which only its owner can read
        _sync(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} could not be written: {error}") from None
    return left_out


def _write_rows(
    chain: Sequence[SavedCheckpoint], folder: Path, with_state: bool, report: Report
) -> dict[str, "_TableFiles"]:
    """Writes the rows of all tables, each shard once as far as possible. Returns what was written."""
    shards = [shard for saved in chain for shard in saved.shards]
    num_bytes, num_read = max(sum(shard.file.num_bytes for shard in shards), 1), 0

    def after_block(num_block_bytes: int) -> None:
        nonlocal num_read
        num_read += num_block_bytes
        report("rows", min(num_read / num_bytes, 1.0))

    tables = {
        name: _TableFiles(folder, folder_name, layout, with_state)
        for (name, layout), folder_name in zip(chain[-1].tables.items(), _folder_names(chain[-1].tables), strict=True)
    }
    try:
        stream = RowStream(chain, after_block)
        for buckets in split_buckets(shards, lambda shard: 8 * shard.num_keys, PIECE_BYTES):
            for rows in stream.rows(buckets):
                if rows.table in tables:
                    tables[rows.table].add(rows)
                if sum(table.num_waiting_bytes for table in tables.values()) > PIECE_BYTES:
                    max(tables.values(), key=lambda table: table.num_waiting_bytes).write()
        for table in tables.values():
            table.finish()
    finally:
        for table in tables.values():
            table.close()
    return tables


class _TableFiles:
    """The Parquet files of one table."""

    def __init__(self, folder: Path, folder_name: str, layout: TableLayout, with_state: bool) -> None:
        self._folder, self._folder_name, self._layout = folder, folder_name, layout
        (folder / folder_name).mkdir()
        value = pa.from_numpy_dtype(torch.empty(0, dtype=layout.dtype).numpy().dtype)
        columns = [("key", pa.int64()), ("row", pa.list_(value, layout.dim))]
        self._has_state = with_state and layout.state_width > 0
        columns += [("state", pa.list_(value, layout.state_width))] if self._has_state else []
        columns += [("step", pa.int64())] if with_state else []
        self._schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])
        self._waiting: list[Rows] = []
        self.num_waiting_bytes = 0
        self._writer: Any = None
        self._num_file_bytes = 0
        self._names: list[str] = []
        self._num_rows = 0

    @property
    def described(self) -> dict[str, Any]:
        return {"rows": self._num_rows, "columns": self._schema.names, "files": self._names}

    def add(self, rows: Rows) -> None:
        if len(rows.keys) > 0:
            self._waiting.append(rows)
            self.num_waiting_bytes += rows.keys.nbytes + rows.records.nbytes + rows.steps.nbytes

    def write(self) -> None:
        """Writes the rows that wait as one row group."""
        waiting, self._waiting, self.num_waiting_bytes = self._waiting, [], 0
        if self._writer is not None and self._num_file_bytes >= FILE_BYTES:
            self._end_file()
        if self._writer is None:
            self._names.append(f"{self._folder_name}/part-{len(self._names):05d}.parquet")
            self._writer, self._num_file_bytes = self._open(self._folder / self._names[-1]), 0
        if waiting:
            columns = self._columns(*(torch.cat(arrays) for arrays in zip(*(r[1:] for r in waiting), strict=True)))
            self._writer.write_table(pa.table([columns[name] for name in self._schema.names], schema=self._schema))
            self._num_rows += len(columns["key"])
            self._num_file_bytes += sum(column.nbytes for column in columns.values())

    def finish(self) -> None:
        """Writes what is left. A table without rows has one file without rows."""
        if self._waiting or not self._names:
            self.write()
        self._end_file()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, file: Path) -> Any:
        return pq.ParquetWriter(file, self._schema, compression="none", use_dictionary=False, write_statistics=["key"])

    def _end_file(self) -> None:
        self.close()
        _sync(self._folder / self._names[-1])

    def _columns(self, keys: Tensor, records: Tensor, steps: Tensor) -> dict[str, Any]:
        """Returns the columns of Arrow. The bits of rows stay as they are."""
        values, dim = records.view(self._layout.dtype), self._layout.dim
        columns = {"key": pa.array(keys.numpy()), "row": _lists(values[:, :dim]), "step": pa.array(steps.numpy())}
        return columns | ({"state": _lists(values[:, dim:])} if self._has_state else {})


def _lists(values: Tensor) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1).numpy()), values.shape[1])


def _folder_names(tables: Iterable[str]) -> list[str]:
    """Returns a folder name for each table: its own name if that is a plain one, else its number."""
    used: set[str] = set()
    names = []
    for number, table in enumerate(tables):
        is_plain = _PLAIN_NAME.fullmatch(table) is not None and table.lower() not in used
        names.append(table if is_plain else f"table~{number}")
        used.add(names[-1].lower())
    return names


def _sync(file: Path) -> None:
    with file.open("rb") as written:
        os.fsync(written.fileno())
