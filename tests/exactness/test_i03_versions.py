"""I3 and I4: every row that is read in step t has exactly the updates of the steps before t.

A row optimizer adds 1 to each row it updates, so that a row is the number of its updates. Fails if the host lane
retrieves b + 1 before it knows what b - 1 has changed (the test swaps them), if slots of the batch in training are
victims (the test makes them so), or if rows are stale (`stale`).
"""

import pytest
import torch
from torch import Tensor

from nestpipe import Batch, Jagged, Sequence, Table, World, init
from nestpipe.embedding.cluster import GIVEN_ORDER
from nestpipe.embedding.row_pool import RowPool
from nestpipe.optim import RowOptimizer
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import OVERLAPPING, SCHEDULES, operations
from nestpipe.store.native.slot_ops import SlotIndex
from tests.exactness.cases import on_ranks
from tests.streams import key_streams

STREAMS = {name: stream for name, stream in key_streams().items() if name not in ("huge_keys", "sparse_random")}
WITH_OVERLAP = ("all_equal", "full_overlap", "random")


class CountUpdates(RowOptimizer):
    can_update_in_parts = True

    def state_width(self, dim: int) -> int:
        return 1

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        rows.add_(1.0)
        state.add_(1.0)


def versions(world: World, stream: str, options: dict) -> list[list[float]]:
    """Returns the rows that this rank saw in each step, in the order of its keys."""
    table = Table("item", 1, init=init.Constant(0.0), optimizer=CountUpdates(0.0))
    batches = [
        Batch({"item": Jagged.one_each(keys[world.rank :: world.size].contiguous())}, weight=float(len(keys)))
        for keys in STREAMS[stream]
    ]
    seen = []
    options = {"num_micro_batches": 2, "clustering": GIVEN_ORDER, **options}
    if options["schedule"] in OVERLAPPING:  # as few slots as the batches in flight need, on any rank
        number = 3 if options["schedule"] == "nested" and world.size > 1 else 2
        sets = [set(keys.tolist()) for keys in STREAMS[stream] if len(keys) > 0]
        options["resident_bytes"] = max(len(set.union(*sets[i : i + number])) for i in range(len(sets))) * (1 + 1) * 4
    with Pipeline({"item": Sequence(table)}, batches, world=world, **options) as steps:
        for step in steps:
            rows: list[float] = []
            for micro_batch in step:
                values = micro_batch.embeddings["item"].values
                rows += values.detach()[:, 0].tolist()
                (values * 0.0).sum().backward()
            seen.append(rows)
            step.update_rows()
    return seen


def expected(stream: str, world_size: int, rank: int) -> list[list[float]]:
    updates: dict[int, int] = {}
    rows = []
    for keys in STREAMS[stream]:
        if len(keys) == 0:
            continue
        rows.append([float(updates.get(key, 0)) for key in keys[rank::world_size].tolist()])
        for key in set(keys.tolist()):
            updates[key] = updates.get(key, 0) + 1
    return rows


def are_right(stream: str, size: int, **options) -> bool:
    results = on_ranks(size, versions, stream, options)
    return all(rows == expected(stream, size, rank) for rank, rows in enumerate(results))


def versions_of_all(world: World, schedule: str) -> dict[str, list[list[float]]]:
    return {stream: versions(world, stream, {"schedule": schedule}) for stream in STREAMS}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [1, 3])
def test_rows_have_all_earlier_updates(schedule: str, size: int) -> None:
    results = on_ranks(size, versions_of_all, schedule)
    assert len(results) == size
    for rank, seen in enumerate(results):
        for stream in STREAMS:
            assert seen[stream] == expected(stream, size, rank), stream


def without_r2(assign):
    """Assigns slots to a batch as if no other were in flight."""
    return lambda self, use, stretch, _, allocate: assign(self, use, stretch, use.batch, allocate)


@pytest.mark.parametrize("schedule", OVERLAPPING)
def test_victims_of_the_batch_in_training_fail(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: slots of batches in flight are never victims. Without that rule one batch's slots seem to be enough. (Claims
    alone would protect new keys.)"""
    assign, growth = SlotIndex.assign, RowPool.growth
    monkeypatch.setattr(SlotIndex, "assign", without_r2(assign))
    monkeypatch.setattr(SlotIndex, "claim", lambda self, slots: torch.zeros(1, dtype=torch.int64))
    monkeypatch.setattr(RowPool, "growth", lambda self, earlier, current: growth(self, [], current))
    assert not are_right("random", 1, schedule=schedule)


@pytest.mark.parametrize("schedule", OVERLAPPING)
@pytest.mark.parametrize("stream", WITH_OVERLAP)
def test_stale_rows_are_one_update_late_and_none_is_lost(schedule: str, stream: str) -> None:
    """The model sees rows of the overlap as before the last update. In the end the store has all updates."""
    got = versions(World(), stream, {"schedule": schedule, "stale": True})
    right = expected(stream, 1, 0)
    batches = [keys.tolist() for keys in STREAMS[stream] if len(keys)]
    for number, (rows, fresh) in enumerate(zip(got, right, strict=True)):
        before = set(batches[number - 1]) if number else set()
        assert rows == [f - 1 if key in before else f for key, f in zip(batches[number], fresh, strict=True)]
    assert got != right
    assert stale_store(stream, schedule) == stale_store(stream, "serial")


def stale_store(stream: str, schedule: str) -> dict[int, list[float]]:
    table = Table("item", 1, init=init.Constant(0.0), optimizer=CountUpdates(0.0))
    batches = [Batch({"item": Jagged.one_each(keys)}, weight=float(len(keys))) for keys in STREAMS[stream]]
    stale = schedule in OVERLAPPING
    with Pipeline({"item": Sequence(table)}, batches, schedule=schedule, stale=stale) as steps:
        for step in steps:
            for micro_batch in step:
                (micro_batch.embeddings["item"].values * 0.0).sum().backward()
            step.update_rows()
    piece = steps.store.export_piece("item", 0, 65536)
    return dict(zip(piece.keys.tolist(), piece.records.tolist(), strict=True))


def swapped(*arguments, **options):
    """Yields write_back(b - 1) and retrieve(b + 1) in the wrong order."""
    held = None
    for op in operations(*arguments, **options):
        if op.stage == "write_back":
            held = op
            continue
        yield op
        if held is not None and op.stage == "retrieve":
            yield held
            held = None


@pytest.mark.parametrize("schedule", OVERLAPPING)
def test_swapping_write_back_and_retrieve_fails(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows I12 too: what b - 1 has changed is not known yet, so its slots must not be evicted."""
    monkeypatch.setattr("nestpipe.pipelining.setup.operations", swapped)
    with pytest.raises(ValueError, match="only 0 are free or may be evicted"):
        are_right("disjoint", 1, schedule=schedule)
