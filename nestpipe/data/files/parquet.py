"""Rows of Parquet or Arrow files as samples, in one order for all ranks, without a conversion beforehand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Dataset, Fingerprint, check_positions
from nestpipe.data.files.decoded_rows import Rows, decode, empty, join, to_batch
from nestpipe.data.files.read_ahead import ReadAhead
from nestpipe.data.files.row_files import BadDataError, RowFile, UnreadableError, find_files, open_files, read_group
from nestpipe.data.files.schema import Schema, find_forms
from nestpipe.data.order import SampleOrder, Window


@dataclass(frozen=True)
class Skipped:
    """The data that skip_bad left out."""

    num_files: int = 0
    """Files that could not be opened; the number of their rows is unknown."""
    num_groups: int = 0
    """Row groups that could not be read."""
    num_rows: int = 0
    """Rows of these row groups, and single rows that do not fit the schema."""
    examples: tuple[str, ...] = ()
    """The first few reasons."""


class ParquetData(Dataset):
    """Samples from the rows of files, as a schema declares them.

    paths: files, folders or patterns, in an order that counts. The seed and the position of a sample determine its row,
    as SampleOrder describes; without shuffle, rows come in the order of the files. num_epochs: None for endless data.

    Opening reads footers, and one row group of inputs whose lists have no fixed size. A row group is read when a sample
    of its window is needed; the next window is read while samples are taken from this one. So at most three windows of
    decoded rows are in memory. With skip_bad, opening reads everything once, and leaves out what cannot be read or does
    not fit the schema: see `skipped`.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        schema: Schema,
        *,
        seed: int = 0,
        shuffle: bool = True,
        window: int = 8,
        num_epochs: int | None = None,
        num_threads: int = 1,
        skip_bad: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """progress: called with the number of row groups that skip_bad has read, and the number of all."""
        if num_epochs is not None and num_epochs < 1:
            raise ValueError(f"num_epochs is {num_epochs}, must be at least 1, or None for endless data")
        self.schema = schema
        self.num_epochs = num_epochs
        self.num_group_reads = 0
        """Row groups read so far; one that is read again counts again."""
        opened, failures = open_files(find_files(paths))
        if failures and not skip_bad:
            raise failures[0]
        for file, file_schema in opened:
            schema.check(file.path, file_schema)
        self._forms = find_forms(opened, schema, skip_bad)
        self.files = [file for file, _ in opened]
        self._groups = [(file, group) for file in self.files for group in range(len(file.group_rows))]
        self._kept: dict[int, NDArray[np.int64]] = {}
        """Rows that stay, of row groups from which some are left out."""
        self.skipped = self._skip(failures, progress) if skip_bad else Skipped()
        sizes = [self._num_rows(number) for number in range(len(self._groups))]
        if sum(sizes) == 0:
            raise BadDataError(f"there are no rows in {', '.join(str(file.path) for file in self.files) or paths}")
        self.order = SampleOrder(sizes, seed, window, shuffle)
        self._ahead = ReadAhead(self.read, num_threads)
        self._lock = Lock()
        self._previous: int | None = None
        """Position of the first sample of the last batch."""
        self._rows: tuple[Window, NDArray[np.int64]] | None = None

    @property
    def num_rows(self) -> int:
        """Samples in an epoch."""
        return self.order.num_rows

    @property
    def num_samples(self) -> int | None:
        return None if self.num_epochs is None else self.num_epochs * self.num_rows

    def samples(self, first: int, count: int) -> Batch:
        check_positions(first, count, self.num_samples)
        if count == 0:
            return to_batch(empty(self.schema, self._forms))
        with self._lock:
            parts, position = [], first
            while position < first + count:
                window = self.order.window_at(position)
                until = min(first + count, window.end)
                decoded, rows = self._ahead.take(window), self._rows_of(window)
                parts.append(decoded.take(rows[position - window.first : until - window.first]))
                position = until
            self._expect_next(first, count)
        return to_batch(join(parts))

    def __getstate__(self) -> dict[str, object]:
        """Returns what another process needs to read the same samples: without threads, and without rows."""
        return self.__dict__ | {"_ahead": self._ahead.num_threads, "_lock": None, "_previous": None, "_rows": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        self._ahead, self._lock = ReadAhead(self.read, int(str(state["_ahead"]))), Lock()

    def fingerprint(self) -> Fingerprint:
        """Uses the names of files without their folders, because data may be moved."""
        files, groups = blake2b(digest_size=16), blake2b(digest_size=16)
        for file in self.files:
            files.update(f"{file.path.name}\n".encode() + file.footer)
        groups.update(self.order.group_rows.tobytes())
        for number, kept in sorted(self._kept.items()):
            groups.update(number.to_bytes(8, "little") + kept.tobytes())
        fingerprint: Fingerprint = {"files": files.hexdigest(), "row groups": groups.hexdigest()}
        fingerprint["shuffle"] = self.order.shuffle
        return fingerprint | ({"seed": self.order.seed, "window": self.order.window} if self.order.shuffle else {})

    def _rows_of(self, window: Window) -> NDArray[np.int64]:
        if self._rows is None or self._rows[0] != window:
            self._rows = window, self.order.rows(window)
        return self._rows[1]

    def _expect_next(self, first: int, count: int) -> None:
        """Begins to read the next window that will be needed, if batches stay as far apart as the last two."""
        previous, self._previous = self._previous, first
        stride = 0 if previous is None else first - previous
        if stride < count:  # the first batch, or a jump back: the distance is unknown
            return
        end = self.order.window_at(first + count - 1).end
        start = first + stride * max(1, -(-(end - first - count + 1) // stride))
        last = self.num_samples
        if last is None or max(start, end) < last:
            self._ahead.expect(self.order.window_at(max(start, end)))

    def _num_rows(self, number: int) -> int:
        file, group = self._groups[number]
        return len(self._kept[number]) if number in self._kept else file.group_rows[group]

    def read(self, number: int) -> Rows:
        """Reads a row group, given by its number in all files."""
        file, group = self._groups[number]
        rows = self._decoded(file, group)
        self.num_group_reads += 1
        if number in self._kept:
            return rows.take(self._kept[number])
        if rows.bad:
            row = min(rows.bad)
            raise BadDataError(f"{file.where(group, row)}: {rows.bad[row]}{_and_more(rows)}")
        return rows

    def _decoded(self, file: RowFile, group: int) -> Rows:
        return decode(read_group(file, group, self.schema.columns), self.schema, self._forms)

    def _skip(self, failures: list[UnreadableError], progress: Callable[[int, int], None] | None) -> Skipped:
        """Reads every row group, and notes the rows that stay of those with bad rows."""
        reasons = [str(failure) for failure in failures]
        num_groups = num_rows = 0
        for number, (file, group) in enumerate(self._groups):
            try:
                rows = self._decoded(file, group)
            except UnreadableError as error:
                self._kept[number] = np.empty(0, np.int64)
                reasons.append(str(error))
                num_groups, num_rows = num_groups + 1, num_rows + file.group_rows[group]
                continue
            if rows.bad:
                self._kept[number] = np.setdiff1d(np.arange(rows.num_rows), np.fromiter(rows.bad, np.int64))
                row = min(rows.bad)
                reasons.append(f"{file.where(group, row)}: {rows.bad[row]}{_and_more(rows)}")
                num_rows += len(rows.bad)
            if progress is not None:
                progress(number + 1, len(self._groups))
        return Skipped(len(failures), num_groups, num_rows, tuple(reasons[:5]))


def _and_more(rows: Rows) -> str:
    return f" ({len(rows.bad)} of its {rows.num_rows} rows are bad)" if len(rows.bad) > 1 else ""
