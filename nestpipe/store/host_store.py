"""The host store: tables in host memory, implemented by the native library."""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import byref, c_double, c_int32, c_int64, c_uint8, c_void_p
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from nestpipe.store import interface as check
from nestpipe.store.host_snapshot import HostSnapshot
from nestpipe.store.interface import Gathered, MemoryReport, Piece, TableSpec
from nestpipe.store.native.library import (
    NativeMemoryReport,
    NativeOptimizer,
    NativeSpec,
    TableChangedError,
    call,
    pointer,
)
from nestpipe.store.snapshot import KeepAside, Snapshot
from nestpipe.store.writer import WriteAccess, Writer


class _Group(NamedTuple):
    """Tables that the same calls name together."""

    numbers: Tensor
    """[n] int32: the native library's table numbers."""
    first: TableSpec | None
    """Spec of the first table; None if the group is empty."""


class HostStore:
    """Tables in host memory. Safe to call from several threads: reads of a table run
    concurrently, writes exclusively.

    num_threads: threads that a bulk call may use. Results do not depend on it.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = check.check_threads(num_threads)
        self._store = c_void_p()
        call("store_create", byref(self._store))
        finalizer = weakref.finalize(self, call, "store_destroy", self._store)
        finalizer.atexit = False  # at exit a daemon thread may still be in a call; the system frees the memory
        self._tables: dict[str, tuple[int, TableSpec]] = {}
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._access = WriteAccess()
        self._snapshot: HostSnapshot | None = None
        self.num_snapshots = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError("a HostStore cannot be copied or pickled; export its tables, and import them into another one")

    @property
    def num_writes(self) -> int:
        return self._access.num_writes

    def create_table(self, spec: TableSpec) -> None:
        a, b = spec.init.parameters
        state = (c_double * spec.state_width)(*spec.full_initial_state)
        native = NativeSpec(
            name=spec.name.encode(),
            dim=spec.dim,
            state_width=spec.state_width,
            initial_state=ctypes.cast(state, ctypes.POINTER(c_double)),
            max_rows=spec.max_rows or 0,
            seed=spec.seed,
            initial_a=a,
            initial_b=b,
            initial=spec.init.code,
            dtype=check.DTYPES.index(spec.dtype),
        )
        number = c_int32()
        call("table_create", self._store, byref(native), byref(number))
        self._tables[spec.name] = (number.value, spec)

    def spec(self, table: str) -> TableSpec:
        return self._table(table)[1]

    def size(self, table: str) -> int:
        num_rows = c_int64()
        call("table_size", *self._handle(table), byref(num_rows))
        return num_rows.value

    def reserve(self, table: str, num_rows: int) -> None:
        check.check_reserve(self.spec(table), num_rows)
        call("table_reserve", *self._handle(table), num_rows)

    def gather(
        self, table: str, keys: Tensor, *, out: Tensor | None = None, rows_only: bool = False, with_steps: bool = False
    ) -> Gathered:
        spec = self.spec(table)
        num_keys = check.check_keys(keys)
        out = check.check_out(spec, out, num_keys, rows_only)
        found = torch.empty(num_keys, dtype=torch.bool)
        steps = torch.empty(num_keys, dtype=torch.int64) if with_steps else None
        call(
            "gather",
            *self._handle(table),
            pointer(keys),
            num_keys,
            out.shape[1],
            pointer(out),
            out.nbytes,
            pointer(found),
            pointer(steps),
            self.num_threads,
        )
        return Gathered(out, found, steps)

    def open_writer(self) -> Writer:
        return self._access.open(self._scatter_tables, self._update_tables)

    def gather_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        out: Tensor,
        places: Tensor | None,
        found: Tensor | None = None,
    ) -> Tensor:
        spec = self._first(tables)
        num_keys = check.check_keys(keys)
        stride = check.check_records_at(spec, out, "out", places, num_keys)
        found = check.check_found(found, num_keys)
        call(
            "gather_tables",
            *self._handles(tables, offsets),
            pointer(keys),
            num_keys,
            pointer(places),
            spec.num_columns,
            pointer(out),
            len(out),
            stride,
            pointer(found),
            self.num_threads,
        )
        return found

    def scatter_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        records: Tensor,
        places: Tensor | None,
        step: int | Tensor,
    ) -> None:
        self._access.begin_write("scatter_tables")
        self._scatter_tables(tables, offsets, keys, records, places, step)

    def _scatter_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        records: Tensor,
        places: Tensor | None,
        step: int | Tensor,
    ) -> None:
        spec = self._first(tables)
        num_keys = check.check_keys(keys)
        stride = check.check_records_at(spec, records, "records", places, num_keys)
        check.check_steps(step, num_keys)
        steps = step if isinstance(step, Tensor) else None
        handles = self._handles(tables, offsets)
        self._preserve_tables(tables, offsets, keys)
        call(
            "scatter_tables",
            *handles,
            pointer(keys),
            num_keys,
            pointer(places),
            pointer(records),
            len(records),
            stride,
            pointer(steps),
            0 if isinstance(step, Tensor) else step,
            self.num_threads,
        )

    def _update_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        optimizer: NativeOptimizer,
        gradient: Tensor,
        step: int,
    ) -> None:
        """See Writer.update_tables."""
        spec = self._first(tables)
        num_keys = check.check_keys(keys)
        check.check_array("gradient", gradient, spec.dtype, [num_keys, spec.dim])
        check.check_step(step)
        handles = self._handles(tables, offsets)
        self._preserve_tables(tables, offsets, keys)
        call(
            "update_tables",
            *handles,
            pointer(keys),
            num_keys,
            byref(optimizer),
            pointer(gradient),
            step,
            self.num_threads,
        )

    def find_tables(self, tables: Sequence[str], offsets: Tensor, keys: Tensor) -> Tensor:
        num_keys = check.check_keys(keys)
        found = torch.empty(num_keys, dtype=torch.bool)
        call(
            "find_tables",
            *self._handles(tables, offsets),
            pointer(keys),
            num_keys,
            pointer(found),
            self.num_threads,
        )
        return found

    def sizes(self, tables: Sequence[str]) -> Tensor:
        numbers = self._group(tables).numbers
        sizes = torch.empty(len(numbers), dtype=torch.int64)
        call("table_sizes", self._store, pointer(numbers), len(numbers), pointer(sizes))
        return sizes

    def scatter(self, table: str, keys: Tensor, records: Tensor, step: int) -> None:
        self._access.begin_write("scatter")
        spec = self.spec(table)
        num_keys = check.check_keys(keys)
        check.check_array("records", records, spec.dtype, [num_keys, spec.num_columns])
        check.check_step(step)
        self._preserve(table, keys)
        call(
            "scatter",
            *self._handle(table),
            pointer(keys),
            num_keys,
            pointer(records),
            records.nbytes,
            step,
            self.num_threads,
        )

    def find(self, table: str, keys: Tensor) -> Tensor:
        num_keys = check.check_keys(keys)
        found = torch.empty(num_keys, dtype=torch.bool)
        call("find", *self._handle(table), pointer(keys), num_keys, pointer(found), self.num_threads)
        return found

    def erase(self, table: str, keys: Tensor) -> int:
        self._access.begin_write("erase")
        num_erased = c_int64()
        num_keys = check.check_keys(keys)
        self._preserve(table, keys)
        call("erase", *self._handle(table), pointer(keys), num_keys, byref(num_erased))
        return num_erased.value

    def count(self, table: str, first_bucket: int, end_bucket: int) -> int:
        check.check_buckets(first_bucket, end_bucket)
        num_rows = c_int64()
        call("count", *self._handle(table), first_bucket, end_bucket, byref(num_rows))
        return num_rows.value

    def export_piece(self, table: str, first_bucket: int, end_bucket: int) -> Piece:
        while True:
            count = self.count(table, first_bucket, end_bucket)
            try:  # leaves room for what other threads insert meanwhile
                return self._export(table, first_bucket, end_bucket, count + count // 8 + 1024)
            except TableChangedError:
                continue

    def _export(self, table: str, first_bucket: int, end_bucket: int, capacity: int) -> Piece:
        spec, num_rows = self.spec(table), c_int64()
        keys, steps = torch.empty(capacity, dtype=torch.int64), torch.empty(capacity, dtype=torch.int64)
        records = torch.empty(capacity, spec.num_columns, dtype=spec.dtype)
        call(
            "export",
            *self._handle(table),
            first_bucket,
            end_bucket,
            capacity,
            pointer(keys),
            pointer(records),
            records.nbytes,
            pointer(steps),
            byref(num_rows),
        )
        written = slice(num_rows.value)
        return Piece(keys[written], records[written], steps[written])

    def import_piece(self, table: str, first_bucket: int, end_bucket: int, piece: Piece) -> None:
        self._access.begin_write("import_piece")
        check.check_buckets(first_bucket, end_bucket)
        num_rows = check.check_piece(self.spec(table), piece)
        self._preserve(table, piece.keys)
        call(
            "import",
            *self._handle(table),
            first_bucket,
            end_bucket,
            num_rows,
            pointer(piece.keys),
            pointer(piece.records),
            piece.records.nbytes,
            pointer(piece.steps),
            self.num_threads,
        )

    def begin_snapshot(self, changed_only: bool, keep_aside: KeepAside) -> Snapshot:
        self.num_snapshots += 1
        self._snapshot = HostSnapshot(self._store, self._tables, changed_only, keep_aside)
        return self._snapshot

    def _preserve(self, table: str, keys: Tensor) -> None:
        """Keeps rows that are about to change aside for a snapshot under way."""
        if self._snapshot is not None:
            self._snapshot.preserve(table, keys)

    def _preserve_tables(self, tables: Sequence[str], offsets: Tensor, keys: Tensor) -> None:
        if self._snapshot is not None and self._snapshot.is_open:
            for table, first, end in zip(tables, offsets.tolist(), offsets[1:].tolist(), strict=False):
                self._preserve(table, keys[max(first, 0) : end])  # offsets are checked by the next call

    def digest_part(self, table: str) -> int:
        digest = (c_uint8 * 32)()
        call("digest", *self._handle(table), digest, self.num_threads)
        return int.from_bytes(bytes(digest), "little")

    def memory(self, table: str) -> MemoryReport:
        report = NativeMemoryReport()
        call("table_memory", *self._handle(table), byref(report))
        return MemoryReport(**{name: getattr(report, name) for name, *_ in report._fields_})

    def _table(self, table: str) -> tuple[int, TableSpec]:
        if table not in self._tables:
            raise ValueError(f"there is no table {table!r} in the store; it has {sorted(self._tables) or 'none'}")
        return self._tables[table]

    def _group(self, tables: Sequence[str]) -> _Group:
        """Returns the group of these names. Looks each name up only in the first call with the same names."""
        names = tuple(tables)
        group = self._groups.get(names)
        if group is None:
            entries = [self._table(name) for name in names]
            numbers = torch.tensor([number for number, _ in entries], dtype=torch.int32)
            group = self._groups[names] = _Group(numbers, entries[0][1] if entries else None)
        return group

    def _first(self, tables: Sequence[str]) -> TableSpec:
        """Returns the spec of the first table. The native library checks that the others have the same records."""
        check.check_some_tables(tables)
        spec = self._group(tables).first
        assert spec is not None
        return spec

    def _handles(self, tables: Sequence[str], offsets: Tensor) -> tuple[c_void_p, int | None, int | None, int]:
        numbers = self._group(tables).numbers
        check.check_offsets("offsets", offsets, len(numbers))
        return self._store, pointer(numbers), pointer(offsets), len(numbers)

    def _handle(self, table: str) -> tuple[c_void_p, int]:
        return self._store, self._table(table)[0]
