"""What is in data before anybody trains on it: columns, counts, how skewed keys are, how much batches share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Dataset
from nestpipe.data.files.manifest import MANIFEST
from nestpipe.data.files.parquet import ParquetData
from nestpipe.data.files.prepared import CLICK_FEATURES, Prepared, read_prepared
from nestpipe.data.files.row_files import RowFile, find_files, open_files
from nestpipe.data.files.schema import Schema
from nestpipe.data.files.user_histories import UserHistories
from nestpipe.data.key_counts import HOTTEST, KeyCounts

NUM_BATCHES = 8
"""consecutive ones, of the order that training has, of which is counted what they share"""
OVERHEAD_BYTES = 32
"""of the store for each row, at most: its key, its place, its step"""
STATE_COLUMNS: dict[str, Callable[[int], int]] = {
    "sgd": lambda dim: 0,
    "rowwise_adagrad": lambda dim: 1,
    "adagrad": lambda dim: dim,
    "adam": lambda dim: 2 * dim,
}
Report = Callable[[str, float], None]


@dataclass(frozen=True)
class KeyColumn:
    """The keys of one column, in all rows, and in batches."""

    name: str
    num_occurrences: int
    num_distinct: int
    is_exact: bool
    """False: there are too many to count each; an estimate from a sample of the keys"""
    hottest: dict[float, float]
    """share of the distinct keys -> share of the occurrences that the hottest of them have"""
    num_per_batch: float
    """distinct keys"""
    overlap: float
    """of a batch's distinct keys, those that the batch before had too"""


@dataclass(frozen=True)
class Inspection:
    what: str
    num_files: int
    num_bytes: int
    num_rows: int
    num_groups: int
    columns: dict[str, str]
    """name -> type"""
    counts: dict[str, int] = field(default_factory=dict)
    """of the manifest"""
    batch_size: int = 0
    keys: list[KeyColumn] = field(default_factory=list)


@dataclass(frozen=True)
class Estimate:
    """Of a table or of all, by the formulas that `nestpipe data inspect` prints."""

    memory_bytes: int
    retrieved_bytes: float
    """a batch, one after another"""
    pipelined_bytes: float
    """a batch, where rows that the next one shares stay"""


def estimate(keys: Sequence[KeyColumn], dim: int, optimizer: str) -> Estimate:
    record_bytes = 4 * (dim + STATE_COLUMNS[optimizer](dim))
    return Estimate(
        sum(column.num_distinct * (record_bytes + OVERHEAD_BYTES) for column in keys),
        sum(column.num_per_batch * record_bytes for column in keys),
        sum(column.num_per_batch * record_bytes * (1 - column.overlap) for column in keys),
    )


def inspect(
    paths: Sequence[Path],
    keys: Sequence[str] = (),
    batch_size: int | None = None,
    max_length: int = 200,
    report: Report = lambda stage, done: None,
) -> Inspection:
    """A prepared folder, or files; of these only the columns and rows, unless key columns are named."""
    if len(paths) == 1 and (paths[0] / MANIFEST).exists():
        return _prepared(read_prepared(paths[0]), keys, batch_size, max_length, report)
    opened, failures = open_files(find_files(paths))
    if failures:
        raise failures[0]
    columns = {name: str(kind) for name, kind in zip(opened[0][1].names, opened[0][1].types, strict=True)}
    files = [file for file, _ in opened]
    if not keys:
        return _inspection("files", files, columns)
    batch_size = batch_size or 2048
    schema = Schema(keys=tuple(keys))
    found = _keys(ParquetData(paths, schema), ParquetData(paths, schema), batch_size, report)
    return _inspection("files", files, columns, batch_size=batch_size, keys=found)


def _prepared(
    found: Prepared, keys: Sequence[str], batch_size: int | None, max_length: int, report: Report
) -> Inspection:
    """Keys of the training part."""
    manifest = found.manifest
    data: ParquetData
    samples: Dataset
    if manifest.kind == "clicks":
        schema, batch_size = Schema(keys=tuple(keys) or CLICK_FEATURES), batch_size or 2048
        data, samples = (ParquetData(found.split("train"), schema) for _ in range(2))
    else:
        batch_size = batch_size or 128
        data = ParquetData(found.split("all"), Schema(keys=["item"]))
        samples = UserHistories(found.users(), max_length)
    of_columns = _keys(data, samples, batch_size, report)
    what = f"prepared {manifest.kind} of {manifest.source}"
    counts = dict(manifest.counts)
    return _inspection(what, data.files, dict(manifest.schema), counts, batch_size, of_columns)


def _inspection(
    what: str,
    files: Sequence[RowFile],
    columns: dict[str, str],
    counts: dict[str, int] | None = None,
    batch_size: int = 0,
    keys: list[KeyColumn] | None = None,
) -> Inspection:
    num_rows = sum(sum(file.group_rows) for file in files)
    num_groups = sum(len(file.group_rows) for file in files)
    num_bytes = sum(file.size_bytes for file in files)
    return Inspection(what, len(files), num_bytes, num_rows, num_groups, columns, counts or {}, batch_size, keys or [])


def _keys(data: ParquetData, samples: Dataset, batch_size: int, report: Report) -> list[KeyColumn]:
    counts = _counted(data, report)
    batches = _batches(data, samples, batch_size, report)
    return [
        KeyColumn(
            name,
            of_name.num_occurrences,
            of_name.num_distinct,
            of_name.is_exact,
            dict(zip(HOTTEST, of_name.shares(), strict=True)),
            *_sharing([batch[name] for batch in batches]),
        )
        for name, of_name in counts.items()
    ]


def _counted(data: ParquetData, report: Report) -> dict[str, KeyCounts]:
    """All rows once, a row group at a time."""
    counts = {name: KeyCounts() for name in data.schema.key_columns}
    for number in range(len(data.order.group_rows)):
        for name, lists in data.read(number).keys.items():
            counts[name].add(lists.only_keys)
        report("counting keys", 0.9 * (number + 1) / len(data.order.group_rows))
    return counts


def _batches(
    data: ParquetData, samples: Dataset, batch_size: int, report: Report
) -> list[dict[str, NDArray[np.int64]]]:
    """The distinct keys of the first batches of training, by column; the second epoch follows the first."""
    num_batches = min(NUM_BATCHES, max(2, data.num_rows // batch_size))
    found = []
    for number in range(num_batches):
        found.append(_distinct(samples.samples(number * batch_size, batch_size)))
        report("comparing batches", 0.9 + 0.1 * (number + 1) / num_batches)
    return found


def _distinct(batch: Batch) -> dict[str, NDArray[np.int64]]:
    """Of histories, items and targets; negatives come on top."""
    if "history" in batch.keys:
        return {"item": np.union1d(batch.keys["history"].values.numpy(), batch.keys["target"].values.numpy())}
    return {name: np.unique(jagged.values.numpy()) for name, jagged in batch.keys.items()}


def _sharing(batches: Sequence[NDArray[np.int64]]) -> tuple[float, float]:
    """Distinct keys of a batch, and the share that the batch before had too."""
    shared = [
        len(np.intersect1d(before, after, assume_unique=True)) / max(len(after), 1)
        for before, after in pairwise(batches)
    ]
    return float(np.mean([len(keys) for keys in batches])), float(np.mean(shared)) if shared else 0.0
