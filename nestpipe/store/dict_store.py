"""The oracle of the host store: the same interface in plain Python, simple and slow."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.store import interface as check
from nestpipe.store.interface import Gathered, MemoryReport, Piece, TableFullError, TableSpec
from nestpipe.store.oracle_values import bucket_of, hash_key, initial_record, owner_of
from nestpipe.store.snapshot import KeepAside, ShardedPiece, Shards, Snapshot
from nestpipe.store.writer import WriteAccess, Writer


@dataclass
class _Table:
    spec: TableSpec
    rows: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """Record and step by key."""
    changed: set[int] = field(default_factory=set)
    """Keys written since the last snapshot began."""
    erased: set[int] = field(default_factory=set)
    """Keys erased since then."""


class DictStore:
    """Tables as dictionaries."""

    num_threads = 1

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}
        self._access = WriteAccess()
        self.num_snapshots = 0

    @property
    def num_writes(self) -> int:
        return self._access.num_writes

    def create_table(self, spec: TableSpec) -> None:
        if spec.name in self._tables:
            raise ValueError(f"the store already has a table {spec.name!r}; give the new one another name")
        self._tables[spec.name] = _Table(spec)

    def spec(self, table: str) -> TableSpec:
        return self._table(table).spec

    def size(self, table: str) -> int:
        return len(self._table(table).rows)

    def reserve(self, table: str, num_rows: int) -> None:
        check.check_reserve(self.spec(table), num_rows)

    def gather(
        self, table: str, keys: Tensor, *, out: Tensor | None = None, rows_only: bool = False, with_steps: bool = False
    ) -> Gathered:
        spec, rows = self.spec(table), self._table(table).rows
        num_keys = check.check_keys(keys)
        out = check.check_out(spec, out, num_keys, rows_only)
        for i, key in enumerate(keys.tolist()):
            record = rows[key][0] if key in rows else torch.tensor(initial_record(spec, key), dtype=torch.float64)
            out[i] = record[: out.shape[1]].to(spec.dtype)
        steps = torch.tensor([rows[key][1] if key in rows else -1 for key in keys.tolist()], dtype=torch.int64)
        return Gathered(out, self.find(table, keys), steps if with_steps else None)

    def scatter(self, table: str, keys: Tensor, records: Tensor, step: int) -> None:
        self._access.begin_write("scatter")
        spec = self.spec(table)
        num_keys = check.check_keys(keys)
        check.check_array("records", records, spec.dtype, [num_keys, spec.num_columns])
        check.check_step(step)
        self._write(table, keys, records, torch.full((num_keys,), step))

    def open_writer(self) -> Writer:
        return self._access.open(self._scatter_tables)

    def gather_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        out: Tensor,
        places: Tensor | None,
        found: Tensor | None = None,
    ) -> Tensor:
        num_keys = check.check_keys(keys)
        self._check_same_records(tables)
        check.check_records_at(self.spec(tables[0]), out, "out", places, num_keys)
        found = check.check_found(found, num_keys)
        places = _places(places, num_keys, len(out))
        for table, stretch in self._stretches(tables, offsets, num_keys):
            gathered = self.gather(table, keys[stretch])
            out[places[stretch]], found[stretch] = gathered.records, gathered.found
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
        num_keys = check.check_keys(keys)
        self._check_same_records(tables)
        check.check_records_at(self.spec(tables[0]), records, "records", places, num_keys)
        check.check_steps(step, num_keys)
        steps = step if isinstance(step, Tensor) else torch.full((num_keys,), step)
        if (steps < 0).any():
            raise ValueError(f"step has a negative number, {int(steps.min())}")
        places = _places(places, num_keys, len(records))
        stretches = self._stretches(tables, offsets, num_keys)
        before = {table: dict(self._table(table).rows) for table in tables}
        try:
            for table, stretch in stretches:
                self._write(table, keys[stretch], records[places[stretch]], steps[stretch])
        except TableFullError:
            for table, rows in before.items():
                self._table(table).rows = rows
            raise

    def find_tables(self, tables: Sequence[str], offsets: Tensor, keys: Tensor) -> Tensor:
        found = torch.empty(check.check_keys(keys), dtype=torch.bool)
        for table, stretch in self._stretches(tables, offsets, len(keys)):
            found[stretch] = self.find(table, keys[stretch])
        return found

    def sizes(self, tables: Sequence[str]) -> Tensor:
        return torch.tensor([self.size(table) for table in tables], dtype=torch.int64)

    def find(self, table: str, keys: Tensor) -> Tensor:
        check.check_keys(keys)
        rows = self._table(table).rows
        return torch.tensor([key in rows for key in keys.tolist()], dtype=torch.bool)

    def erase(self, table: str, keys: Tensor) -> int:
        self._access.begin_write("erase")
        check.check_keys(keys)
        target, num_erased = self._table(table), 0
        for key in keys.tolist():
            if target.rows.pop(key, None) is not None:
                num_erased += 1
                target.changed.discard(key)
                target.erased.add(key)
        return num_erased

    def count(self, table: str, first_bucket: int, end_bucket: int) -> int:
        return len(self._keys_in(table, first_bucket, end_bucket))

    def export_piece(self, table: str, first_bucket: int, end_bucket: int) -> Piece:
        spec, rows = self.spec(table), self._table(table).rows
        keys = self._keys_in(table, first_bucket, end_bucket)
        records = [rows[key][0] for key in keys]
        return Piece(
            torch.tensor(keys, dtype=torch.int64),
            torch.stack(records) if records else torch.empty(0, spec.num_columns, dtype=spec.dtype),
            torch.tensor([rows[key][1] for key in keys], dtype=torch.int64),
        )

    def import_piece(self, table: str, first_bucket: int, end_bucket: int, piece: Piece) -> None:
        self._access.begin_write("import_piece")
        check.check_buckets(first_bucket, end_bucket)
        check.check_piece(self.spec(table), piece)
        for key, step in zip(piece.keys.tolist(), piece.steps.tolist(), strict=True):
            if not first_bucket <= bucket_of(key, table) < end_bucket:
                raise ValueError(
                    f"key {key} is in bucket {bucket_of(key, table)}, outside [{first_bucket}, {end_bucket})"
                )
            if step < 0:
                raise ValueError(f"step {step} of key {key} is negative")
        self._write(table, piece.keys, piece.records, piece.steps)

    def begin_snapshot(self, changed_only: bool, keep_aside: KeepAside) -> Snapshot:
        if changed_only and self.num_snapshots == 0:
            raise ValueError("there has been no snapshot yet, so nothing says what has changed; begin a complete one")
        self.num_snapshots += 1
        return DictSnapshot(self._tables, changed_only)

    def digest_part(self, table: str) -> int:
        total = 0
        for key, (record, _) in self._table(table).rows.items():
            data = key.to_bytes(8, "little", signed=True) + record.numpy().tobytes()
            total += int.from_bytes(hashlib.sha256(data).digest(), "little")
        return total % 2**256

    def memory(self, table: str) -> MemoryReport:
        """Counts rows, row state, keys and steps; ignores the overhead of Python's objects."""
        size, record_bytes = self.size(table), self.spec(table).record_bytes
        payload = size * record_bytes
        return MemoryReport(size, record_bytes, payload, 8 * size, 8 * size, 0, payload + 16 * size)

    def _table(self, table: str) -> _Table:
        if table not in self._tables:
            raise ValueError(f"there is no table {table!r} in the store; it has {sorted(self._tables) or 'none'}")
        return self._tables[table]

    def _check_same_records(self, tables: Sequence[str]) -> None:
        check.check_some_tables(tables)
        first = self.spec(tables[0])
        for spec in map(self.spec, tables):
            if (spec.num_columns, spec.dtype) != (first.num_columns, first.dtype):
                raise ValueError(f"tables of one call need records of one size: {first.name!r} and {spec.name!r}")

    def _stretches(self, tables: Sequence[str], offsets: Tensor, num_keys: int) -> list[tuple[str, slice]]:
        """Returns each table with the slice of its keys."""
        check.check_offsets("offsets", offsets, len(tables))
        for table in tables:
            self._table(table)
        if len(set(tables)) < len(tables):
            raise ValueError(f"a table is given twice in {list(tables)}")
        bounds = offsets.tolist()
        if bounds[0] != 0 or bounds[-1] != num_keys or bounds != sorted(bounds):
            raise ValueError(f"offsets do not rise from 0 to the number of keys, {num_keys}")
        return [(table, slice(*bounds[t : t + 2])) for t, table in enumerate(tables)]

    def _keys_in(self, table: str, first_bucket: int, end_bucket: int) -> list[int]:
        check.check_buckets(first_bucket, end_bucket)
        keys = [key for key in self._table(table).rows if first_bucket <= bucket_of(key, table) < end_bucket]
        return sorted(keys, key=lambda key: hash_key(key, table))

    def _write(self, table: str, keys: Tensor, records: Tensor, steps: Tensor) -> None:
        spec, rows = self.spec(table), self._table(table).rows
        if spec.max_rows is not None and len(rows.keys() | set(keys.tolist())) > spec.max_rows:
            raise TableFullError(f"table {table!r} is full: it may hold max_rows = {spec.max_rows} rows")
        for key, record, step in zip(keys.tolist(), records, steps.tolist(), strict=True):
            rows[key] = (record.detach().clone(), step)
            self._table(table).changed.add(key)


class DictSnapshot:
    """See Snapshot. It has a copy of everything, so nothing has to be kept aside."""

    def __init__(self, tables: dict[str, _Table], changed_only: bool) -> None:
        self._rows: dict[str, dict[int, tuple[Tensor, int]]] = {}
        self._specs = {name: table.spec for name, table in tables.items()}
        self.erased: dict[str, Tensor] = {}
        for name, table in tables.items():
            keys = [key for key in table.rows if not changed_only or key in table.changed]
            self._rows[name] = {key: table.rows[key] for key in keys}
            self.erased[name] = torch.tensor(sorted(table.erased) if changed_only else [], dtype=torch.int64)
            table.changed, table.erased = set(), set()
        self.num_rows = {name: len(rows) for name, rows in self._rows.items()}

    def pieces(self, table: str, shards: Shards, num_bytes: int) -> Iterator[ShardedPiece]:
        spec, rows = self._specs[table], self._rows[table]
        shard = {key: bucket_of(key, table) * shards.num_in_world // check.NUM_BUCKETS - shards.first for key in rows}
        capacity = max(1, num_bytes // (spec.record_bytes + 16))
        for first in range(0, len(rows), capacity):
            keys = sorted(list(rows)[first : first + capacity], key=shard.__getitem__)
            piece = Piece(
                torch.tensor(keys, dtype=torch.int64),
                torch.stack([rows[key][0] for key in keys]),
                torch.tensor([rows[key][1] for key in keys], dtype=torch.int64),
            )
            counts = torch.bincount(torch.tensor([shard[key] for key in keys]), minlength=shards.num_own)
            yield ShardedPiece(piece, counts)

    def end(self) -> None:
        pass


def _places(places: Tensor | None, num_keys: int, num_records: int) -> Tensor:
    """Returns the checked places; 0, 1, 2, ... if none are given."""
    for place in [] if places is None else places.tolist():
        if not 0 <= place < num_records:
            raise ValueError(f"place {place} is outside of an array of {num_records}")
    return torch.arange(num_keys) if places is None else places


def unique(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The oracle of key_ops.unique."""
    numbers: dict[int, int] = {}
    inverse = [numbers.setdefault(key, len(numbers)) for key in keys.tolist()]
    return torch.tensor(list(numbers), dtype=torch.int64), torch.tensor(inverse, dtype=torch.int64)


def match_tables(before: Tensor, before_offsets: Tensor, keys: Tensor, key_offsets: Tensor) -> Tensor:
    """The oracle of key_ops.match_tables."""
    before_starts, key_starts, places = before_offsets.tolist(), key_offsets.tolist(), []
    for t in range(len(key_starts) - 1):
        known = before[before_starts[t] : before_starts[t + 1]].tolist()
        numbers = {key: before_starts[t] + number for number, key in enumerate(known)}
        places += [numbers.get(key, -1) for key in keys[key_starts[t] : key_starts[t + 1]].tolist()]
    return torch.tensor(places, dtype=torch.int64)


def group_by_owner(table: str, keys: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """The oracle of key_ops.group_by_owner."""
    owners = [owner_of(key, table, world_size) for key in keys.tolist()]
    order = sorted(range(len(owners)), key=owners.__getitem__)
    counts = [owners.count(rank) for rank in range(world_size)]
    return torch.tensor(order, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
