"""Snapshots of the host store."""

import ctypes
from collections import Counter
from collections.abc import Iterator
from ctypes import byref, c_int32, c_int64, c_void_p
from threading import Condition

import torch
from torch import Tensor

from nestpipe.store.interface import Piece, TableSpec
from nestpipe.store.native.library import NativeRows, call, pointer
from nestpipe.store.snapshot import KeepAside, ShardedPiece, Shards

ASIDE_BYTES = 8 << 20
"""Most bytes of rows that are kept aside in one piece."""


class HostSnapshot:
    """See Snapshot. The native library knows which rows still have to be copied."""

    def __init__(
        self, store: c_void_p, tables: dict[str, tuple[int, TableSpec]], changed_only: bool, keep_aside: KeepAside
    ) -> None:
        self._store = store
        self._tables = dict(tables)
        self._keep_aside = keep_aside
        self._open_tables: set[str] = set()
        """Tables whose rows may still have to be kept aside."""
        self._num_preserving = Counter[str]()
        """By table: threads with rows that they have taken for the snapshot and not handed over yet."""
        self._condition = Condition()
        self.num_rows: dict[str, int] = {}
        self.erased: dict[str, Tensor] = {}
        try:
            for table in self._tables:
                self._begin(table, changed_only)
        except BaseException:
            self.end()
            raise

    def _begin(self, table: str, changed_only: bool) -> None:
        num_rows, num_erased = c_int64(), c_int64()
        call("snapshot_begin", *self._handle(table), changed_only, byref(num_rows), byref(num_erased))
        self._open_tables.add(table)
        erased = torch.empty(num_erased.value, dtype=torch.int64)
        call("snapshot_erased", *self._handle(table), num_erased, pointer(erased))
        self.num_rows[table], self.erased[table] = num_rows.value, erased

    @property
    def is_open(self) -> bool:
        """Returns whether rows may still have to be kept aside."""
        return bool(self._open_tables)

    def pieces(self, table: str, shards: Shards, num_bytes: int) -> Iterator[ShardedPiece]:
        rows = _Rows(self._tables[table][1], num_bytes, self.num_rows[table])
        counts = torch.zeros(shards.num_own, dtype=torch.int64)
        num_rows, is_done = c_int64(), c_int32()
        while not is_done.value:
            call(
                "snapshot_next",
                *self._handle(table),
                *shards,
                byref(rows.native),
                pointer(counts),
                byref(num_rows),
                byref(is_done),
            )
            if num_rows.value > 0:
                yield ShardedPiece(rows.first(num_rows.value), counts)
        with self._condition:
            self._open_tables.discard(table)
            self._condition.wait_for(lambda: self._num_preserving[table] == 0)  # their rows belong to the snapshot

    def preserve(self, table: str, keys: Tensor) -> None:
        """Keeps the rows of these keys aside, as far as the snapshot still needs them. Call it before they change."""
        with self._condition:
            if table not in self._open_tables or len(keys) == 0:
                return
            self._num_preserving[table] += 1
        try:
            self._hand_over(table, keys)
        finally:
            with self._condition:
                self._num_preserving[table] -= 1
                self._condition.notify_all()

    def _hand_over(self, table: str, keys: Tensor) -> None:
        rows = _Rows(self._tables[table][1], ASIDE_BYTES, len(keys))
        first, num_rows, num_done = 0, c_int64(), c_int64()
        while first < len(keys):
            rest = keys[first:]
            call(
                "snapshot_preserve",
                *self._handle(table),
                pointer(rest),
                len(rest),
                byref(rows.native),
                byref(num_rows),
                byref(num_done),
            )
            if num_rows.value > 0:
                self._keep_aside(table, rows.copy_of_first(num_rows.value))
            first += num_done.value

    def end(self) -> None:
        with self._condition:
            self._open_tables.clear()
        for table in self._tables:
            call("snapshot_end", *self._handle(table))

    def _handle(self, table: str) -> tuple[c_void_p, int]:
        return self._store, self._tables[table][0]


class _Rows:
    """Memory for rows, and its native description."""

    def __init__(self, spec: TableSpec, num_bytes: int, most: int) -> None:
        capacity = max(1, min(most, num_bytes // (spec.record_bytes + 16)))
        self._keys, self._steps = torch.empty(capacity, dtype=torch.int64), torch.empty(capacity, dtype=torch.int64)
        self._records = torch.empty(capacity, spec.num_columns, dtype=spec.dtype)
        self.native = NativeRows(
            keys=ctypes.c_void_p(pointer(self._keys)),
            records=ctypes.c_void_p(pointer(self._records)),
            steps=ctypes.c_void_p(pointer(self._steps)),
            capacity=capacity,
            num_columns=spec.num_columns,
        )

    def first(self, num_rows: int) -> Piece:
        return Piece(self._keys[:num_rows], self._records[:num_rows], self._steps[:num_rows])

    def copy_of_first(self, num_rows: int) -> Piece:
        """Returns the rows without the memory behind them."""
        return Piece(*(array.clone() for array in self.first(num_rows)))
