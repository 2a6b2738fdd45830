"""Clicks in the order of their lines: dense values as logarithms, categories as keys, the last part held out."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nestpipe.data.files.prepared import NUM_DENSE, NUM_FIELDS
from nestpipe.datasets.engine import EngineError, Report
from nestpipe.datasets.samples.parquet_out import BatchStream, parquet_file, write_group
from nestpipe.datasets.text_files import estimate_lines
from nestpipe.datasets.work import Prepared, Stages, Work, WrittenFile, no_good_line, scan_report

TIME_SHARES = {"reading": 0.95, "splitting": 0.05}
ROWS_A_GROUP = 1 << 16
ROWS_A_FILE = ROWS_A_GROUP * 64
SCHEMA = pa.schema(
    [
        pa.field("label", pa.int64(), nullable=False),
        *(pa.field(f"dense_{number}", pa.float32(), nullable=False) for number in range(NUM_DENSE)),
        *(pa.field(f"key_{number}", pa.int64()) for number in range(NUM_FIELDS)),
    ]
)


def prepare_clicks(work: Work, held_out_share: int | None) -> Prepared:
    """Holds out the last 1 / held_out_share of the rows, or the last file if that is None.

    The first half of the held-out rows is for validation, the second for the test.
    """
    stages = Stages(work.progress, TIME_SHARES)
    report = stages.begin("reading")
    num_bad, num_before_last = 0, 0
    # The splits depend on the number of rows, so all rows are written to a spool first.
    with ClickFiles(work.folder, "spool", SCHEMA) as spool:
        for number, file in enumerate(work.source.files):
            num_before_last = spool.num_rows
            with work.reading(file):
                num_bad += _read(work, file, spool, scan_report(work.source, number, report))
            if spool.num_rows == num_before_last:
                raise no_good_line(file)
    num_bad += work.num_rejected()
    num_rows = spool.num_rows
    num_train = num_before_last if held_out_share is None else num_rows - num_rows // held_out_share
    num_validation = (num_rows - num_train + 1) // 2
    splits = {"train": num_train, "validation": num_validation, "test": num_rows - num_train - num_validation}
    if 0 in splits.values():
        raise ValueError(f"{work.source.files[-1]}: too few good lines to hold some out; splits would be {splits}")
    files = split_spool(work.folder, SCHEMA, spool.files, splits, stages.begin("splitting"))
    return Prepared("clicks", SCHEMA, {"rows": num_rows, **splits, "bad_lines": num_bad}, files)


def _read(work: Work, file: Path, spool: "ClickFiles", report: Report) -> int:
    """Copies the good lines of a file to the spool; returns the number of bad ones."""
    num_bad, num_read, num_lines = 0, 0, estimate_lines(file)
    try:
        for batch in work.engine.batches(_select(work, file)):
            num_read += len(batch)
            report(min(1.0, num_read / num_lines))
            is_good = batch.column("good")
            num_bad_in_batch = len(batch) - int(pc.sum(is_good).as_py() or 0)
            if num_bad_in_batch and not work.skip_bad:
                raise work.bad_line(file)
            num_bad += num_bad_in_batch
            spool.write(batch.filter(is_good) if num_bad_in_batch else batch)
    except EngineError as error:
        raise work.failed_scan(file, error) from None
    return num_bad


def _select(work: Work, file: Path) -> str:
    """Returns SQL for the columns of SCHEMA, and whether a line is `good`."""
    dense = ", ".join(
        f"CAST(ln(1 + CAST(greatest(coalesce(dense_{number}, 0), 0) AS DOUBLE)) AS FLOAT) AS dense_{number}"
        for number in range(NUM_DENSE)
    )
    keys = ", ".join(f"key_{number}" for number in range(NUM_FIELDS))
    lines = work.source.text_format.lines(file, skip_bad=work.skip_bad)
    return f"SELECT label, {dense}, {keys}, good FROM ({lines})"


class ClickFiles:
    """Writes files name-00000.parquet, ... of ROWS_A_FILE rows each, whatever the sizes of the batches it is given."""

    def __init__(self, folder: Path, name: str, schema: pa.Schema, first_number: int = 0) -> None:
        self._folder = folder
        self._name = name
        self._schema = schema
        self._number = first_number
        self._file: pq.ParquetWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0
        self.files: list[WrittenFile] = []
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
            self.files.append(WrittenFile(name, self._name, 0))
            self._number += 1
        write_group(self._file, group)
        last = self.files[-1]
        self.files[-1] = WrittenFile(last.name, last.split, last.num_rows + len(group))
        if self.files[-1].num_rows == ROWS_A_FILE:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def split_spool(
    folder: Path, schema: pa.Schema, spool: Sequence[WrittenFile], splits: Mapping[str, int], report: Report
) -> list[WrittenFile]:
    """Turns the spooled files into those of the splits: renames what lies whole in the first one, copies the rest."""
    first, num_rows = next(iter(splits.items()))
    num_whole = num_rows // ROWS_A_FILE
    files = []
    for number, spooled in enumerate(spool[:num_whole]):
        files.append(WrittenFile(f"{first}-{number:05}.parquet", first, spooled.num_rows))
        (folder / spooled.name).rename(folder / files[-1].name)
    rest = [folder / spooled.name for spooled in spool[num_whole:]]
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
