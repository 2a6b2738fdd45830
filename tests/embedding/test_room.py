"""A table that outgrows its limit on one rank is detected before the dense step, on all ranks.

Fails if room_error skips tables without max_rows: the native store then refuses, after the dense step.
"""

import time
from unittest.mock import patch

import pytest
import torch

from nestpipe import World
from nestpipe.embedding import group as group_module
from nestpipe.embedding.batch_rows import BatchRows
from nestpipe.embedding.capacity import Capacity
from nestpipe.embedding.host_memory import HostMemory
from nestpipe.embedding.resident import Growth, ResidentBatch
from nestpipe.embedding.row_pool import RowPool
from nestpipe.embedding.table import Pooled, Table
from nestpipe.store import HostStore
from tests.embedding.owned import owned_keys
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of
from tests.schedules import OUTER

LIMIT = 20


def run_into_the_limit(world: World, schedule: str) -> tuple[str, str, float, bool, int]:
    """Trains with tables that can have at most LIMIT rows on the last rank."""
    case = Case("adagrad", "pooled_sum", 2, steps=6, schedule=schedule)
    batches = share_of(global_batches(case.steps), world)
    trainer, expected = make_trainer(world, case), make_trainer(world, case)
    limit = LIMIT if world.rank == world.size - 1 else group_module.MOST_ROWS
    started = time.perf_counter()
    raised: Exception = AssertionError("nothing was raised")
    with patch.object(group_module, "MOST_ROWS", limit):
        try:
            trainer.fit(batches)
        except Exception as error:
            raised = error
    seconds = time.perf_counter() - started
    expected.fit(batches[: trainer.num_steps])
    return type(raised).__name__, str(raised), seconds, trainer.digest() == expected.digest(), trainer.num_steps


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("size", [1, 2])
def test_no_step_is_applied_in_part(schedule: str, size: int) -> None:
    """The digest includes the dense parameters and the dense optimizer's state."""
    for rank, (name, message, seconds, unchanged, num_steps) in enumerate(on_ranks(size, run_into_the_limit, schedule)):
        assert name == ("ValueError" if rank == size - 1 else "RankError")
        assert f"rows on this rank, more than the {LIMIT} that a table can have on one rank" in message
        assert "nothing of this step was applied. Use more ranks" in message
        assert seconds < 20
        assert unchanged
        assert num_steps < 6


def store_of(tables: list[Table]) -> HostStore:
    """Returns a store whose tables have 50 rows each."""
    store = HostStore()
    for table in tables:
        store.create_table(table.spec(seed=0))
        store.scatter(table.name, torch.arange(50), torch.zeros(50, table.dim), 0)
    return store


def group_of(tables: list[Table]) -> group_module.TableGroup:
    (group,) = group_module.group_features({table.name: Pooled(table) for table in tables}).groups
    return group


@pytest.mark.parametrize("max_rows", [None, 100])
def test_keys_are_looked_up_only_near_the_limit(max_rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if BatchRows.room_error counts a key that has a row, or a frozen table."""
    monkeypatch.setattr(group_module, "MOST_ROWS", 100)
    group = group_of([Table("item", 2, max_rows=max_rows)])
    store = store_of(list(group.tables))
    looked_up: list[int] = []
    find = store.find_tables
    monkeypatch.setattr(store, "find_tables", lambda *given: looked_up.append(len(given[2])) or find(*given))
    rows = BatchRows(store, HostMemory())

    def error_of(*keys: int) -> str:
        return str(rows.room_error(rows.retrieve([owned_keys(group, keys)])))

    assert error_of(*range(50, 100)) == "None"
    assert looked_up == []
    assert error_of(*range(100)) == "None"
    assert "would have 101 rows" in error_of(*range(101))
    assert looked_up == [100, 101]
    frozen = group_of([Table("item", 2, max_rows=max_rows, frozen=True)])
    assert rows.room_error(rows.retrieve([owned_keys(frozen, range(200))])) is None


def pool_on(group: group_module.TableGroup, store: HostStore, num_slots: int = 1000) -> RowPool:
    pool = RowPool([group], store, HostMemory(), Capacity("minimum", torch.device("cpu")))
    pool.open(store)
    pool.grow(Growth((num_slots,), 0))
    return pool


def test_every_table_of_a_group_has_its_own_limit() -> None:
    """Fails if room_error adds up the tables of a group, or uses the first one's max_rows for all."""
    group = group_of([Table("a", 2), Table("b", 2, max_rows=60), Table("c", 2, max_rows=80)])
    for make in (lambda store: BatchRows(store, HostMemory()), lambda store: pool_on(group, store)):
        rows = make(store_of(list(group.tables)))

        def error_of(*keys: range, rows=rows) -> str:
            batch = rows.retrieve([owned_keys(group, *keys)])
            error = rows.room_error(batch)
            rows.settle(batch, None)
            return str(error)

        assert error_of(range(500), range(50, 60), range(50, 80)) == "None"
        assert "table 'b' would have 61 rows on this rank, more than its max_rows = 60" in error_of(
            range(0), range(45, 61), range(0)
        )
        assert "table 'c' would have 81 rows" in error_of(range(0), range(0), range(50, 81))


def test_rows_that_are_not_stored_count_too() -> None:
    """R9: counted are the store's 50 rows, resident keys that exist, those of batches in flight, those of this batch.

    Fails if SlotIndex.claim leaves out rows that exist in the pool alone (keys 50 to 59), keys claimed by a batch in
    flight (60 to 69), or counts a key of two batches twice (65 to 69); or if settle(None) keeps claims.
    """
    group = group_of([Table("item", 2, max_rows=80)])
    pool = pool_on(group, store_of(list(group.tables)))

    def retrieved(*keys: int) -> tuple[ResidentBatch, str]:
        batch = pool.retrieve([owned_keys(group, keys)])
        return batch, str(pool.room_error(batch))

    applied, error = retrieved(*range(40, 60))
    assert error == "None"
    pool.settle(applied, 1)
    in_flight, error = retrieved(*range(60, 70))
    assert error == "None"
    full, error = retrieved(*range(65, 80))
    assert error == "None"
    pool.settle(full, None)
    full, error = retrieved(*range(65, 81))
    assert "would have 81 rows" in error
    pool.settle(in_flight, None)
    pool.settle(full, None)
    assert retrieved(*range(71, 91))[1] == "None"
    assert "would have 81 rows" in retrieved(91)[1]
