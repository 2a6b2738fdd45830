"""A table that outgrows its limit on one rank is detected before the dense step, on all ranks.

Fails if room_error skips tables without max_rows: the native store then refuses, after the dense step.
"""

import time
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nestpipe import World
from nestpipe.embedding import group as group_module
from nestpipe.embedding.resident import ResidentRows, room_error
from nestpipe.embedding.table import Pooled, Table
from nestpipe.store import HostStore
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


def resident(tables: list[Table], *keys: Tensor) -> list[ResidentRows]:
    """Returns resident rows of one group, with the keys of each table in order of name."""
    (group,) = group_module.group_features({table.name: Pooled(table) for table in tables}).groups
    num_keys = sum(map(len, keys))
    offsets = torch.tensor([0, *map(len, keys)]).cumsum(0)
    is_stored = torch.ones(num_keys, dtype=torch.bool)
    return [ResidentRows(group, torch.cat(keys), offsets, torch.zeros(num_keys, group.dim), is_stored)]


def store_of(tables: list[Table]) -> HostStore:
    """Returns a store whose tables have 50 rows each."""
    store = HostStore()
    for table in tables:
        store.create_table(table.spec(seed=0))
        store.scatter(table.name, torch.arange(50), torch.zeros(50, table.dim), 0)
    return store


@pytest.mark.parametrize("max_rows", [None, 100])
def test_keys_are_looked_up_only_near_the_limit(max_rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has 50 rows, and the previous batch is not written back yet.

    Fails if room_error ignores the previous batch, counts a key that has a row, or counts a key of both batches twice.
    """
    monkeypatch.setattr(group_module, "MOST_ROWS", 100)
    tables = [Table("item", 2, max_rows=max_rows)]
    store = store_of(tables)
    looked_up: list[int] = []
    find = store.find
    monkeypatch.setattr(store, "find", lambda name, keys: looked_up.append(len(keys)) or find(name, keys))

    def error_of(keys: Tensor, previous: Tensor) -> str:
        return str(room_error(resident(tables, keys), resident(tables, previous), store))

    assert error_of(torch.arange(50, 75), torch.arange(75, 100)) == "None"
    assert looked_up == []
    assert error_of(torch.arange(100), torch.arange(60, 100)) == "None"
    assert "would have 101 rows" in error_of(torch.arange(101), torch.arange(60, 100))
    assert "would have 101 rows" in error_of(torch.arange(50, 75), torch.arange(75, 101))
    assert looked_up == [100, 101, 51]
    frozen = [Table("item", 2, max_rows=max_rows, frozen=True)]
    assert room_error(resident(frozen, torch.arange(200)), [], store) is None


def test_every_table_of_a_group_has_its_own_limit() -> None:
    """Fails if room_error adds up the tables of a group, or uses the first one's max_rows for all."""
    tables = [Table("a", 2), Table("b", 2, max_rows=60), Table("c", 2, max_rows=80)]
    store, none = store_of(tables), torch.empty(0, dtype=torch.int64)

    def error_of(*keys: Tensor) -> str:
        return str(room_error(resident(tables, *keys), resident(tables, none, torch.arange(55, 60), none), store))

    assert error_of(torch.arange(500), torch.arange(50, 60), torch.arange(50, 80)) == "None"
    assert "table 'b' would have 61 rows on this rank, more than its max_rows = 60" in error_of(
        none, torch.tensor([50, 51, 52, 53, 54, 60]), none
    )
    assert "table 'c' would have 81 rows" in error_of(none, none, torch.arange(50, 81))
