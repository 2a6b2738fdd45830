"""A snapshot has the rows of the moment at which it began, each once, whatever is written while it is copied.

Fails, for example, if Table::erase does not clear the mark of a row (changed_.clear), if Table::begin_snapshot leaves
out `erased_keys_.clear()`, if HostStore._update_tables does not preserve, if update_records does not mark rows as
changed, if Table::preserve does not clear the bit of a row, or if HostStore.erase does not call _preserve.
"""

from dataclasses import dataclass
from threading import Event, Thread

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nestpipe.embedding.optim import RowWiseAdagrad
from nestpipe.store import DictStore, HostStore, Piece, ShardedPiece, Shards, Store, TableSpec, group_by_owner
from nestpipe.store import host_snapshot as host_snapshot_module
from nestpipe.store.oracle_values import owner_of
from tests.store.test_against_oracle import outcome
from tests.streams import INT64_MAX, INT64_MIN, key_streams

KEYS = st.integers(0, 25) | st.sampled_from([INT64_MIN, INT64_MAX, -1, 2**62])
KEY_LISTS = st.lists(KEYS, max_size=20)
TABLES = ("item", "tag")
Rows = dict[int, tuple[list[float], int]]


def rows_of(pieces: list[Piece]) -> Rows:
    """Returns record and step by key. No key may be there twice."""
    rows = {}
    for keys, records, steps in pieces:
        for key, record, step in zip(keys.tolist(), records.tolist(), steps.tolist(), strict=True):
            assert key not in rows
            rows[key] = (record, step)
    return rows


def all_rows(store: Store, table: str) -> Rows:
    return rows_of([store.export_piece(table, 0, 65536)])


def copied(piece: Piece) -> Piece:
    return Piece(*(array.clone() for array in piece))


def in_shards(table: str, sharded: ShardedPiece, shards: Shards) -> bool:
    """Returns whether rows are in order of their shards, and `counts` says how many each has."""
    owners = [owner_of(key, table, shards.num_in_world) for key in sharded.piece.keys.tolist()]
    counted = torch.repeat_interleave(torch.arange(shards.num_own), sharded.counts) + shards.first
    return len(sharded.counts) == shards.num_own and counted.tolist() == owners


class TwoStores:
    """Makes the same writes to both stores, and copies the rows of the native one by snapshots."""

    def __init__(self, dtype: torch.dtype, dim: int, num_threads: int) -> None:
        self.native, self.oracle = HostStore(num_threads), DictStore()
        for store in (self.native, self.oracle):
            for table in TABLES:
                store.create_table(TableSpec(table, dim, 1, (0.5,), dtype=dtype))
        self.dtype, self.num_columns, self.num_writes = dtype, dim + 1, 0
        self.base: dict[str, Rows] | None = None
        """Rows by applying all snapshots so far; None if one was given up since the last complete one."""

    def write(self, kind: str, table: str, keys: list[int]) -> None:
        self.num_writes += 1
        tensor, number = torch.tensor(keys, dtype=torch.int64), self.num_writes
        generator = torch.Generator().manual_seed(number)
        records = torch.rand(len(keys), self.num_columns, generator=generator, dtype=self.dtype)
        split = torch.tensor([0, len(keys) // 2, len(keys)])
        for store in (self.native, self.oracle):
            if kind == "scatter":
                store.scatter(table, tensor, records, number)
            elif kind == "train":  # as a pipeline does
                writer = store.open_writer()
                writer.scatter_tables(TABLES, split, tensor, records, None, number)
                writer.close()
            elif kind == "update":
                self.update(store, sorted(set(keys)), records)
            elif kind == "erase":
                store.erase(table, tensor)
            elif kind == "grow":  # the index is built anew
                store.reserve(table, 50 * len(keys))
            else:  # "import", which refuses keys outside of the buckets, and then changes nothing
                piece = Piece(tensor, records, torch.arange(len(keys)) + number)
                outcome(store, "import_piece", table, 30_000 if number % 2 else 0, 65536, piece)

    def update(self, store: Store, keys: list[int], records: torch.Tensor) -> None:
        """Updates rows where they are stored, as a pipeline does; the oracle copies them."""
        optimizer, dim, step = RowWiseAdagrad(0.1), self.num_columns - 1, self.num_writes
        tensor, gradient = torch.tensor(keys, dtype=torch.int64), records[: len(keys), :dim].contiguous()
        split, writer = torch.tensor([0, len(keys) // 2, len(keys)]), store.open_writer()
        native_form = optimizer.native_for(step)
        assert native_form is not None
        if writer.can_update:
            writer.update_tables(TABLES, split, tensor, native_form, gradient, step)
        else:
            copies = torch.empty(len(keys), self.num_columns, dtype=self.dtype)
            store.gather_tables(TABLES, split, tensor, copies, None)
            optimizer.apply(copies[:, :dim], copies[:, dim:], gradient, step)
            writer.scatter_tables(TABLES, split, tensor, copies, None, step)
        writer.close()

    def copy(self, plan: "Plan") -> None:
        """Copies rows by one snapshot, while others are written."""
        is_complete = plan.is_complete or self.native.num_snapshots == 0
        shards, whole = (
            Shards(plan.num_shards, 0, plan.num_shards),
            {table: all_rows(self.oracle, table) for table in TABLES},
        )
        model = self.oracle.begin_snapshot(not is_complete, lambda table, piece: None)
        expected = {table: rows_of([part.piece for part in model.pieces(table, shards, 1000)]) for table in TABLES}
        erased = {table: set(model.erased[table].tolist()) for table in TABLES}
        taken: dict[str, list[Piece]] = {table: [] for table in TABLES}
        snapshot = self.native.begin_snapshot(not is_complete, lambda table, piece: taken[table].append(copied(piece)))
        assert snapshot.num_rows == {table: len(rows) for table, rows in expected.items()}
        assert {table: set(snapshot.erased[table].tolist()) for table in TABLES} == erased
        passes = {table: snapshot.pieces(table, shards, plan.num_bytes) for table in TABLES}

        def take(table: str) -> bool:
            sharded = next(passes[table], None)
            if sharded is None:
                return False
            assert 0 < len(sharded.piece.keys) <= max(1, plan.num_bytes // (self.num_columns * 4 + 16))
            assert in_shards(table, sharded, shards)
            taken[table].append(copied(sharded.piece))
            return True

        for kind, table, keys in plan.meanwhile:
            if kind == "take":
                take(table)
            else:
                self.write(kind, table, keys)
        while not plan.is_given_up and any(take(table) for table in TABLES):
            pass
        snapshot.end()
        snapshot.end()
        if plan.is_given_up:
            self.base = None
            return
        rows = {table: rows_of(taken[table]) for table in TABLES}
        assert rows == expected
        if is_complete:
            self.base = rows
        elif self.base is not None:  # first what was erased, then the rows
            for table in TABLES:
                kept = {key: row for key, row in self.base[table].items() if key not in erased[table]}
                self.base[table] = kept | rows[table]
        assert self.base is None or self.base == whole


TABLE_KEYS = st.sampled_from(TABLES), KEY_LISTS
WRITES = st.tuples(st.sampled_from(["scatter", "train", "update", "erase", "erase", "import", "grow"]), *TABLE_KEYS)


@dataclass(frozen=True)
class Plan:
    before: list[tuple[str, str, list[int]]]
    meanwhile: list[tuple[str, str, list[int]]]
    is_complete: bool
    num_shards: int
    num_bytes: int
    is_given_up: bool


PLANS = st.builds(
    Plan,
    before=st.lists(WRITES, max_size=4),
    meanwhile=st.lists(WRITES | st.tuples(st.just("take"), *TABLE_KEYS), max_size=8),
    is_complete=st.sampled_from([False, False, True]),
    num_shards=st.sampled_from([1, 3, 7]),
    num_bytes=st.sampled_from([1, 200, 1 << 20]),
    is_given_up=st.sampled_from([False, False, False, True]),
)
STORES = st.tuples(st.sampled_from([torch.float32, torch.float64]), st.integers(1, 9), st.integers(1, 3))
GENERATES = Phase.explicit, Phase.generate


def check(arguments: tuple[torch.dtype, int, int], plans: list[Plan]) -> None:
    stores = TwoStores(*arguments)
    for plan in plans:
        for write in plan.before:
            stores.write(*write)
        stores.copy(plan)
    for table in TABLES:
        assert stores.native.digest_part(table) == stores.oracle.digest_part(table)


@given(STORES, st.lists(PLANS, min_size=4, max_size=8))
@settings(max_examples=16, deadline=None, derandomize=True, phases=GENERATES)
def test_rows_of_the_beginning(arguments: tuple[torch.dtype, int, int], plans: list[Plan]) -> None:
    """Random writes and snapshots, some given up. Changes, applied to what was copied before, give the whole."""
    check(arguments, plans)


@pytest.mark.slow
@pytest.mark.timeout(300)
@given(STORES, st.lists(PLANS, min_size=4, max_size=20))
@settings(max_examples=300, deadline=None)
def test_many_snapshots(arguments: tuple[torch.dtype, int, int], plans: list[Plan]) -> None:
    check(arguments, plans)


def test_the_first_snapshot_is_complete() -> None:
    for store in (HostStore(), DictStore()):
        store.create_table(TableSpec("item", 2))
        with pytest.raises(ValueError, match="nothing says what has changed"):
            store.begin_snapshot(True, lambda table, piece: None)


@pytest.mark.parametrize("aside_bytes", [1, 1 << 20])
def test_streams(aside_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is written in the middle of a snapshot of changes, on one of three ranks; one batch is erased. Rows
    come in shards of that rank. Fails if HostSnapshot.preserve does not go on behind the first piece."""
    monkeypatch.setattr(host_snapshot_module, "ASIDE_BYTES", aside_bytes)
    spec, shards = TableSpec("item", 3, dtype=torch.float64), Shards(15, 5, 5)
    for stream in key_streams().values():
        own = [keys[group_by_owner("item", keys, 3)[0].split(group_by_owner("item", keys, 3)[1].tolist())[1]]
               for keys in stream]  # fmt: skip
        store, base = HostStore(), dict[int, tuple[list[float], int]]()
        store.create_table(spec)
        for step, keys in enumerate(own):
            whole, pieces = all_rows(store, "item"), list[Piece]()
            snapshot = store.begin_snapshot(step > 0, lambda table, piece: pieces.append(copied(piece)))  # noqa: B023
            kept = {key: row for key, row in base.items() if key not in snapshot.erased["item"].tolist()}
            rows = snapshot.pieces("item", shards, 200)
            first = next(rows, None)
            taken = [] if first is None else [copied(first.piece)]
            store.scatter("item", keys, torch.full((len(keys), 3), float(step), dtype=torch.float64), step)
            store.erase("item", own[step // 2] if step % 3 == 2 else keys[:0])
            for sharded in rows:
                assert in_shards("item", sharded, shards)
                taken.append(copied(sharded.piece))
            snapshot.end()
            base = kept | rows_of(taken + pieces)
            assert base == whole


def test_a_row_of_another_rank_is_refused() -> None:
    store = HostStore()
    store.create_table(TableSpec("item", 2))
    store.scatter("item", torch.arange(50), torch.zeros(50, 2), 0)
    snapshot = store.begin_snapshot(False, lambda table, piece: None)
    with pytest.raises(ValueError, match="is in a bucket of another rank"):
        list(snapshot.pieces("item", Shards(8, 4, 4), 1000))
    with pytest.raises(ValueError, match="has a snapshot under way"):
        store.begin_snapshot(False, lambda table, piece: None)
    snapshot.end()
    snapshot = store.begin_snapshot(True, lambda table, piece: None)
    assert snapshot.num_rows == {"item": 0}


def test_few_rows_aside_take_little_memory() -> None:
    """Fails if HostSnapshot hands over a view of an array for all keys of the write."""
    store, aside = HostStore(), list[Piece]()
    store.create_table(TableSpec("item", 8))
    store.scatter("item", torch.arange(3), torch.zeros(3, 8), 0)
    store.begin_snapshot(False, lambda table, piece: aside.append(piece))
    store.scatter("item", torch.arange(100_000), torch.ones(100_000, 8), 1)
    assert rows_of(aside) == {key: ([0.0] * 8, 0) for key in range(3)}
    assert sum(array.untyped_storage().nbytes() for piece in aside for array in piece) == 3 * (8 + 32 + 8)


def test_a_row_on_its_way_aside_is_waited_for() -> None:
    """A thread has taken rows for the snapshot and has not handed them over when the pass ends.

    Fails if HostSnapshot.pieces does not wait for it: the rows would be lost.
    """
    store, aside, is_reached, may_go_on = HostStore(), list[Piece](), Event(), Event()
    store.create_table(TableSpec("item", 2))
    store.scatter("item", torch.arange(50), torch.zeros(50, 2), 0)

    def keep_aside(table: str, piece: Piece) -> None:
        is_reached.set()
        assert may_go_on.wait(20)
        aside.append(piece)

    snapshot, taken = store.begin_snapshot(False, keep_aside), list[Piece]()
    writer = Thread(target=lambda: store.scatter("item", torch.arange(10), torch.ones(10, 2), 1))
    writer.start()
    assert is_reached.wait(20)
    reader = Thread(target=lambda: taken.extend(copied(s.piece) for s in snapshot.pieces("item", Shards(1, 0, 1), 99)))
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    may_go_on.set()
    reader.join(20)
    assert rows_of(taken + aside) == {key: ([0.0, 0.0], 0) for key in range(50)}
    writer.join(20)
