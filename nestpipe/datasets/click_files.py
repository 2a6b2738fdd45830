"""Clicks in Parquet: spooled while their number is not known yet, then cut into splits."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.datasets.engine import Report
from nestpipe.datasets.parquet_out import BatchStream, parquet_file, write_group
from nestpipe.datasets.work import Made

ROWS_A_GROUP = 1 << 16
ROWS_A_FILE = ROWS_A_GROUP * 64


class ClickFiles:
    """Files name-00000.parquet, ... with so many rows each, whatever the sizes of the batches that are written."""

    def __init__(self, folder: Path, name: str, schema: pa.Schema, first_number: int = 0) -> None:
        self._folder = folder
        self._name = name
        self._schema = schema
        self._number = first_number
        self._file: pq.ParquetWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0
        self.files: list[Made] = []
        self.num_rows = 0

    def __enter__(self) -> "ClickFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._num_waiting:
            self._write_groups(self._num_waiting)
        self._close()

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch.select(self._schema.names).cast(self._schema))
        self._num_waiting += len(batch)
        self.num_rows += len(batch)
        if self._num_waiting >= ROWS_A_GROUP:
            self._write_groups(self._num_waiting // ROWS_A_GROUP * ROWS_A_GROUP)

    def _write_groups(self, num_rows: int) -> None:
        waiting = pa.Table.from_batches(self._waiting)
        for first in range(0, num_rows, ROWS_A_GROUP):
            self._write_group(waiting.slice(first, min(ROWS_A_GROUP, num_rows - first)))
        self._waiting = waiting.slice(num_rows).to_batches()
        self._num_waiting -= num_rows

    def _write_group(self, group: pa.Table) -> None:
        if self._file is None:
            name = f"{self._name}-{self._number:05}.parquet"
            self._file = parquet_file(self._folder / name, self._schema)
            self.files.append(Made(name, self._name, 0))
            self._number += 1
        write_group(self._file, group)
        last = self.files[-1]
        self.files[-1] = Made(last.name, last.split, last.num_rows + len(group))
        if self.files[-1].num_rows == ROWS_A_FILE:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def split_spool(
    folder: Path, schema: pa.Schema, spool: Sequence[Made], splits: Mapping[str, int], report: Report
) -> list[Made]:
    """Files that are whole in the first split only get its name; the rest is copied, split by split."""
    first, num_rows = next(iter(splits.items()))
    num_whole = num_rows // ROWS_A_FILE
    files = []
    for number, made in enumerate(spool[:num_whole]):
        files.append(Made(f"{first}-{number:05}.parquet", first, made.num_rows))
        (folder / made.name).rename(folder / files[-1].name)
    rest = [folder / made.name for made in spool[num_whole:]]
    stream = BatchStream(_batches(rest, report))
    for split, num_rows in splits.items():
        number = num_whole if split == first else 0
        with ClickFiles(folder, split, schema, number) as out:
            for batch in stream.take(num_rows - number * ROWS_A_FILE):
                out.write(batch)
        files += out.files
    for path in rest:
        path.unlink()
    return files


def _batches(files: Sequence[Path], report: Report) -> Iterator[pa.RecordBatch]:
    for number, path in enumerate(files):
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(ROWS_A_GROUP)
        report((number + 1) / len(files))
