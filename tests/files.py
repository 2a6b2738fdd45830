"""Writes small files of rows and small prepared folders."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.data.files.manifest import Manifest, describe_file


def write_parquet(path: Path, columns: Mapping[str, object], group_rows: int = 10) -> Path:
    pq.write_table(pa.table(dict(columns)), path, row_group_size=group_rows)
    return path


def write_arrow(path: Path, columns: Mapping[str, object], group_rows: int = 10) -> Path:
    table = pa.table(dict(columns))
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=group_rows)
    return path


def write_numbers(folder: Path, sizes: Sequence[int] = (95, 40), group_rows: int = 10) -> list[Path]:
    """Row r, counted through all files, has the key r and r % 3 tags, so a batch shows its rows."""
    paths, first = [], 0
    for number, size in enumerate(sizes):
        rows = range(first, first + size)
        columns = {
            "number": pa.array(list(rows)),
            "tags": pa.array([[row * 10 + i for i in range(row % 3)] for row in rows], pa.list_(pa.int32())),
            "x": pa.array([row / 2 for row in rows]),
            "y": pa.array([row % 2 for row in rows], pa.int8()),
        }
        writer = write_arrow if number % 2 else write_parquet
        paths.append(writer(folder / f"part-{number}.{'arrow' if number % 2 else 'parquet'}", columns, group_rows))
        first += size
    return paths


def write_histories(folder: Path, source: str = "movielens-1m", num_users: int = 60, num_items: int = 50) -> Path:
    """Writes users with 5 to 34 items as `nestpipe data prepare` does."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)
    items = [draws.permutation(num_items)[: 5 + user % 30].tolist() for user in range(num_users)]
    times = [(1000 * user + np.cumsum(draws.integers(1, 500, len(own)))).tolist() for user, own in enumerate(items)]
    lists = pa.list_(pa.int64())
    columns = {"user": np.arange(num_users), "item": pa.array(items, lists), "time_seconds": pa.array(times, lists)}
    half = num_users // 2
    files = []
    for number, part in enumerate((slice(None, half), slice(half, None))):
        path = folder / f"users-{number:05}.parquet"
        write_parquet(path, {name: column[part] for name, column in columns.items()})
        files.append(describe_file(path, "all", len(columns["user"][part])))
    schema = {"user": "int64", "item": "list<int64>", "time_seconds": "list<int64>"}
    counts = {"users": num_users, "items": num_items, "events": sum(map(len, items))}
    Manifest("histories", source, schema, counts, files, {}, ["nestpipe", "data", "prepare"]).write(folder)
    return folder


def click_columns(num_rows: int, seed: int = 0) -> dict[str, object]:
    draws = np.random.default_rng(seed)
    columns: dict[str, object] = {"label": draws.integers(0, 2, num_rows)}
    columns |= {f"dense_{i}": draws.random(num_rows).astype(np.float32) for i in range(13)}
    for i in range(26):
        columns[f"key_{i}"] = pa.array(draws.integers(0, 2**32, num_rows) % (10 + i), mask=draws.random(num_rows) < 0.1)
    return columns


def write_clicks(folder: Path, source: str = "criteo-kaggle", num_rows: int = 400) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for seed, (split, rows) in enumerate((("train", num_rows), ("validation", 50), ("test", 50))):
        path = write_parquet(folder / f"{split}-00000.parquet", click_columns(rows, seed), 64)
        files.append(describe_file(path, split, rows))
    Manifest("clicks", source, {}, {"rows": num_rows + 100}, files, {}, ["nestpipe", "data", "prepare"]).write(folder)
    return folder
