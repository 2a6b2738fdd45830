"""Inspects data before training: columns, counts, skew of the keys, and keys that batches share."""

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
"""Consecutive batches, in the order of training, that are compared."""
OVERHEAD_BYTES = 32
"""Most bytes that the store adds to a row: key, index, step."""
Report = Callable[[str, float], None]
"""Takes the stage and the share of the whole that is done, 0 to 1."""


@dataclass(frozen=True)
class KeyColumn:
    """The keys of one column, in all rows and in batches."""

    name: str
    num_occurrences: int
    num_distinct: int
    is_exact: bool
    """False if there are too many keys to count each, so that a sample of them is used."""
    hottest: dict[float, float]
    """Share of the distinct keys -> share of the occurrences that the hottest of them have."""
    num_per_batch: float
    """Mean number of distinct keys of a batch."""
    overlap: float
    """Share of a batch's distinct keys that the previous batch had, too."""


@dataclass(frozen=True)
class Inspection:
    what: str
    num_files: int
    num_bytes: int
    num_rows: int
    num_groups: int
    columns: dict[str, str]
    """Name -> type."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts in the manifest."""
    batch_size: int = 0
    keys: list[KeyColumn] = field(default_factory=list)


@dataclass(frozen=True)
class Estimate:
    """Memory and traffic of some tables, by the formulas that `nestpipe data inspect` prints."""

    memory_bytes: int
    retrieved_bytes: float
    """Bytes for each batch, if all its rows are retrieved."""
    pipelined_bytes: float
    """Bytes for each batch, if rows that the previous batch had stay on the device."""


def estimate(keys: Sequence[KeyColumn], record_bytes: int) -> Estimate:
    """Estimates for records, rows with their state, of this size."""
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
    """Inspects a prepared folder, or files. The keys of files are counted only if their columns are named."""
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
    key_columns = _key_columns(ParquetData(paths, schema), ParquetData(paths, schema), batch_size, report)
    return _inspection("files", files, columns, batch_size=batch_size, keys=key_columns)


def _prepared(
    prepared: Prepared, keys: Sequence[str], batch_size: int | None, max_length: int, report: Report
) -> Inspection:
    """Inspects a prepared folder; of clicks, the training split."""
    manifest = prepared.manifest
    data: ParquetData
    samples: Dataset
    if manifest.kind == "clicks":
        schema, batch_size = Schema(keys=tuple(keys) or CLICK_FEATURES), batch_size or 2048
        data, samples = (ParquetData(prepared.split("train"), schema) for _ in range(2))
    else:
        batch_size = batch_size or 128
        data = ParquetData(prepared.split("all"), Schema(keys=["item"]))
        samples = UserHistories(prepared.users(), max_length)
    key_columns = _key_columns(data, samples, batch_size, report)
    what = f"prepared {manifest.kind} of {manifest.source}"
    counts = dict(manifest.counts)
    return _inspection(what, data.files, dict(manifest.schema), counts, batch_size, key_columns)


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


def _key_columns(data: ParquetData, samples: Dataset, batch_size: int, report: Report) -> list[KeyColumn]:
    counts = _count_keys(data, report)
    batches = _distinct_keys(data, samples, batch_size, report)
    return [
        KeyColumn(
            name,
            key_counts.num_occurrences,
            key_counts.num_distinct,
            key_counts.is_exact,
            dict(zip(HOTTEST, key_counts.shares(), strict=True)),
            *_size_and_overlap([batch[name] for batch in batches]),
        )
        for name, key_counts in counts.items()
    ]


def _count_keys(data: ParquetData, report: Report) -> dict[str, KeyCounts]:
    """Reads all rows once, one row group at a time."""
    counts = {name: KeyCounts() for name in data.schema.key_columns}
    for number in range(len(data.order.group_rows)):
        for name, lists in data.read(number).keys.items():
            counts[name].add(lists.only_keys)
        report("counting keys", 0.9 * (number + 1) / len(data.order.group_rows))
    return counts


def _distinct_keys(
    data: ParquetData, samples: Dataset, batch_size: int, report: Report
) -> list[dict[str, NDArray[np.int64]]]:
    """Returns the distinct keys of the first batches of training, by column. Small data goes on to its second epoch."""
    num_batches = min(NUM_BATCHES, max(2, data.num_rows // batch_size))
    batches = []
    for number in range(num_batches):
        batches.append(_distinct(samples.samples(number * batch_size, batch_size)))
        report("comparing batches", 0.9 + 0.1 * (number + 1) / num_batches)
    return batches


def _distinct(batch: Batch) -> dict[str, NDArray[np.int64]]:
    """Returns distinct keys by column: of histories, items and targets, without negatives."""
    if "history" in batch.keys:
        return {"item": np.union1d(batch.keys["history"].values.numpy(), batch.keys["target"].values.numpy())}
    return {name: np.unique(jagged.values.numpy()) for name, jagged in batch.keys.items()}


def _size_and_overlap(batches: Sequence[NDArray[np.int64]]) -> tuple[float, float]:
    """Returns the mean number of distinct keys of a batch, and the share that the previous batch had, too."""
    shared = [
        len(np.intersect1d(before, after, assume_unique=True)) / max(len(after), 1)
        for before, after in pairwise(batches)
    ]
    return float(np.mean([len(keys) for keys in batches])), float(np.mean(shared)) if shared else 0.0
