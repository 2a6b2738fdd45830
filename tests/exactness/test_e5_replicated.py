"""E5: a table has the same bits whether its rows are sharded or replicated, whatever else is set.

Fails if replicated tables have late gradients (without `not self.is_replicated` in TableGroup.allows_late_gradients),
if sums travel in the form of gradients (`self._codecs.gradients` instead of PLAIN in DistributedBatch.share_sums), if a
rank writes rows of other owners to the store of the run (`target.scatter_tables(tables, offsets, keys, records, places,
step)` in ReplicaStore.write), if a run begins with old copies (without `refresh` or `forget_replicas` in Stages.open),
if gradients of the owner alone are applied (`sums.values` in RowUpdate.apply), or if early rows are not left out
(without `early.zero_()` in crossing._owned_marks).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from nestpipe import Trainer, World
from nestpipe.embedding import crossing
from nestpipe.embedding.replica_store import ReplicaStore
from nestpipe.embedding.row_pool import RowPool
from nestpipe.evaluation.evaluate import evaluate
from nestpipe.pipelining.schedule import SCHEDULES
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of
from tests.exactness.test_e1_bit_identical import STREAMS, stream_batches
from tests.exactness.test_x_across_batches import EVENTS, NUM_BATCHES, batches_of

PLACES = [("shared", ("item",)), ("pooled_mean", ("tag",)), ("sequence", ("item", "tag")), ("pooled_sum", ("item",))]
"""Layouts of the features, and the tables that are replicated."""
CODECS = [(None, None), ("bfloat16", "int8"), (None, "float16"), ("int8", None)]
"""Forms of rows and gradients in messages."""
OPTIMIZERS = ("adam", "adagrad", "sgd", "rowwise_adagrad")
WAYS = [*((schedule, True) for schedule in SCHEDULES), ("nested", False)]
"""Schedules, and whether they exchange across batches."""

Run = tuple[str, tuple[str | None, str | None], Case]
"""Stream, forms in messages, and settings."""


def trainer_of(world: World, case: Case, **options: object) -> Trainer:
    trainer = make_trainer(world, case, **options)
    trainer.check_split = False
    return trainer


def trained(world: World, run: Run, cross_batch: bool = True) -> tuple[str, list[float]]:
    stream, (rows, gradients), case = run
    trainer = trainer_of(world, case, row_dtype=rows, gradient_dtype=gradients, cross_batch=cross_batch)
    losses = trainer.fit(stream_batches(stream, world)).losses
    return trainer.digest(), losses


def differing(world: World, runs: list[Run], num_ways: int = len(WAYS)) -> list[tuple[Run, str, bool]]:
    """Returns the runs that do not give the result of serial with sharded tables. num_ways: those of each run; the next
    run begins with another one."""
    wrong = []
    for number, (stream, codecs, case) in enumerate(runs):
        expected = trained(world, (stream, codecs, replace(case, replicated=())))
        for schedule, cross_batch in [WAYS[(number + i) % len(WAYS)] for i in range(num_ways)]:
            run = stream, codecs, replace(case, schedule=schedule)
            if trained(world, run, cross_batch) != expected:
                wrong.append((run, schedule, cross_batch))
    return wrong


def runs_of(streams: list[str], first: int = 0) -> list[Run]:
    """Combines each stream with other settings than the one before."""
    sizes, dtypes = cycle((1, 4, 2, 3, 1)), cycle((torch.float64, torch.float64, torch.float32))
    runs = []
    for number, stream in enumerate(streams, start=first):
        (layout, names), codecs = PLACES[number % 4], CODECS[number * 3 // 4 % 4]
        window = "resend" if codecs == (None, None) and number % 3 == 1 else "once"
        case = Case(OPTIMIZERS[number % 4], layout, next(sizes), window, replicated=names, dtype=next(dtypes))
        runs.append((stream, codecs, case))
    return runs


@pytest.mark.parametrize(
    ("size", "streams", "num_ways"),
    [(2, STREAMS[::2], 3), *(pytest.param(size, STREAMS, 5, marks=pytest.mark.slow) for size in (2, 3, 4))],
    ids=["2-some", "2", "3", "4"],
)
def test_streams(size: int, streams: list[str], num_ways: int) -> None:
    """Serial, inter, intra and nested, with and without exchange across batches, on hostile streams of keys."""
    for wrong in on_ranks(size, differing, runs_of(streams, first=size), num_ways):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_streams_everywhere(size: int, num_micro_batches: int) -> None:
    pairs = product(PLACES, zip(CODECS, OPTIMIZERS, strict=True))
    runs = [
        (stream, codecs, Case(optimizer, layout, num_micro_batches, replicated=names))
        for stream, ((layout, names), (codecs, optimizer)) in zip(cycle(STREAMS), pairs, strict=False)
    ]
    for wrong in on_ranks(size, differing, runs):
        assert wrong == []


# ---- what happens at a boundary, replicated and nested against sharded and serial ----


def interrupted(world: World, event: str, folder: Path) -> list[tuple[int, bool]]:
    results = []
    for at in range(1, NUM_BATCHES - 1):
        sharded = Case("rowwise_adagrad" if event == "settings" else "adam", "shared", 2)
        digests = []
        for case in (sharded, replace(sharded, schedule="nested", replicated=("item",))):
            trainer = trainer_of(world, case)
            seen = EVENTS[event](trainer, batches_of("some", world), at, folder)
            digests.append([*seen, trainer.digest(), str(trainer.num_steps)])
        results.append((at, digests[0] == digests[1]))
    return results


SLOW_EVENTS = {"save", "stop", "error", "settings", "all fail"}


@pytest.mark.parametrize(
    "event", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_EVENTS else ()) for name in EVENTS]
)
def test_an_event_at_every_step(event: str, tmp_path: Path) -> None:
    """A save is loaded into sharded tables. Steps that are not finite, or not steps, change no replica."""
    for results in on_ranks(2, interrupted, event, tmp_path):
        assert [at for at, is_equal in results if not is_equal] == []


# ---- the store ----


def copies_of(trainer: Trainer) -> ReplicaStore:
    assert isinstance(trainer.pool, RowPool)
    assert isinstance(trainer.pool.store, ReplicaStore)
    return trainer.pool.store


CASE = Case("adam", "pooled_mean", 2, schedule="nested", steps=6, replicated=("tag",))


def seen_by_the_store(world: World) -> tuple[int, int, str]:
    """Returns the numbers of rows that this rank owns and that its copies have, and the hash of the copies. Two of six
    batches are pulled, but never trained."""
    trainer = trainer_of(world, CASE)
    trainer.fit(share_of(global_batches(CASE.steps), world), steps=4)
    store = copies_of(trainer)
    return trainer.store.size("tag"), store.copies.size("tag"), str(store.copies.digest_part("tag"))


def test_each_rank_has_all_rows_of_the_applied_batches_and_owns_its_part() -> None:
    results = on_ranks(3, seen_by_the_store)
    trained_keys = torch.cat([batch.keys["tags"].values for batch in global_batches(4)])
    num_rows = len(trained_keys[trained_keys >= 0].unique())
    assert {hash_of for *_, hash_of in results} == {results[0][2]}
    assert all(num_copies == num_rows for _, num_copies, _ in results)
    assert sum(num_owned for num_owned, *_ in results) == num_rows
    assert all(num_owned < num_rows for num_owned, *_ in results)


def written_between_two_fits(world: World, replicated: tuple[str, ...], schedule: str) -> tuple[str, str]:
    """Imports rows between two calls of fit, then writes to the store of one owner alone."""
    trainer = trainer_of(world, replace(CASE, replicated=replicated, schedule=schedule))
    batches = share_of(global_batches(CASE.steps), world)
    trainer.fit(batches[:2])
    trainer.import_rows("tag", torch.arange(0, 50, 3), torch.full((17, 3), 0.5, dtype=torch.float64))
    trainer.fit(batches[2:4])
    if world.rank == 0:
        keys = trainer.store.export_piece("tag", 0, 65536).keys
        trainer.store.scatter("tag", keys, trainer.store.gather("tag", keys).records * 0.5, step=4)
    trainer.fit(batches[4:])
    evaluation = evaluate(trainer, batches[:2])
    return trainer.digest(), repr(evaluation)


def test_writes_between_two_calls_of_fit_reach_every_replica() -> None:
    """And evaluation reads rows, and counts keys that were never trained, as it does without replicas."""
    for schedule in ("serial", "nested"):
        expected = on_ranks(2, written_between_two_fits, (), schedule)
        assert on_ranks(2, written_between_two_fits, ("tag",), schedule) == expected


def saved_at(world: World, path: Path, steps: int, replicated: tuple[str, ...]) -> str:
    """Trains on from a checkpoint, if there is one, and saves. The global batch does not depend on the world."""
    trainer = trainer_of(world, replace(CASE, replicated=replicated))
    if path.exists():
        trainer.load(path)
    share = slice(world.rank * 24 // world.size, (world.rank + 1) * 24 // world.size)
    trainer.fit([batch[share] for batch in global_batches(steps)[trainer.num_steps :]])
    trainer.save(path)
    return trainer.digest()


@pytest.mark.parametrize("sizes", [(2, 3, 1), pytest.param((4, 2, 3), marks=pytest.mark.slow)], ids=str)
def test_resumes_at_another_world_size_and_placement(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """The checkpoint has each row once: digests depend on the world sizes alone."""
    placements = [((), (), ()), (("tag",), ("tag",), ("item", "tag")), (("item",), (), ("tag",))]
    results = [
        [
            on_ranks(size, saved_at, tmp_path / str(number), 2 * (i + 1), names)[0]
            for i, (size, names) in enumerate(zip(sizes, placement, strict=True))
        ]
        for number, placement in enumerate(placements)
    ]
    assert results == [results[0]] * 3


def failing_step(world: World, placement: tuple[str, ...], schedule: str, max_rows: int) -> int:
    """Returns the step at which table item is full."""
    trainer = trainer_of(world, replace(CASE, replicated=placement, schedule=schedule))
    for feature in trainer.features.values():
        if feature.table.name == "item":
            object.__setattr__(feature.table, "max_rows", max_rows)
    trainer.store = trainer.empty_store()
    with pytest.raises(Exception, match=r"would have .* rows"):
        trainer.fit(share_of(global_batches(CASE.steps), world))
    return trainer.num_steps


def test_max_rows_counts_the_whole_table() -> None:
    """As in a world of one."""
    num_rows = [len(torch.cat([b.keys["items"].values for b in global_batches(n)]).unique()) for n in range(1, 6)]
    for max_rows in (num_rows[0] - 1, num_rows[1]):
        expected = on_ranks(1, failing_step, (), "serial", max_rows)
        for schedule in ("serial", "nested"):
            assert on_ranks(2, failing_step, ("item",), schedule, max_rows) == expected * 2


# ---- options ----


def norm_and_bytes(world: World, replicated: tuple[str, ...], freezes: bool) -> tuple[str, list[float], int]:
    """Trains with clipping of the rows' norm; returns also the bytes of rows that were sent."""
    case = replace(CASE, layout="shared" if freezes else "pooled_sum", replicated=replicated)
    trainer = trainer_of(world, case, clip_norm=0.5, clip_rows=True)
    for feature in trainer.features.values():
        object.__setattr__(feature.table, "frozen", freezes)
    trainer.store = trainer.empty_store()
    result = trainer.fit(share_of(global_batches(CASE.steps), world))
    num_bytes = sum(times.sizes["exchanged_row_bytes_per_step"] for times in result.times)
    return trainer.digest(), result.losses, int(num_bytes)


@pytest.mark.parametrize("freezes", [False, True])
def test_clipped_and_frozen_rows(freezes: bool) -> None:
    """No replicated row travels."""
    expected = on_ranks(2, norm_and_bytes, (), freezes)
    results = on_ranks(2, norm_and_bytes, ("item", "tag"), freezes)
    assert [result[:2] for result in results] == [result[:2] for result in expected]
    assert all(num_bytes > 0 for *_, num_bytes in expected)
    assert all(num_bytes == 0 for *_, num_bytes in results)


def trained_in(world: World, replicated: tuple[str, ...], resident_bytes: int | None) -> str:
    trainer = trainer_of(world, replace(CASE, replicated=replicated), resident_bytes=resident_bytes)
    trainer.fit(share_of(global_batches(CASE.steps), world))
    return trainer.digest()


def test_no_limit_of_the_row_pool_counts_replicated_rows() -> None:
    """Fails if RowPool._bounded has all groups."""
    with pytest.raises(ValueError, match=r"more than memory.resident_bytes = 8"):
        trained_in(World(), ("tag",), 8)
    assert trained_in(World(), ("item", "tag"), 8) == trained_in(World(), (), None)


def early_and_late(world: World) -> list[bool]:
    """Returns whether some owned key of a replicated group was early or late."""
    found: list[bool] = []
    owned_marks: Callable = crossing._owned_marks

    def recorded(earlier, later, has_late, num_threads):
        early, late = owned_marks(earlier, later, has_late, num_threads)
        for g, dedup in enumerate(later.owner_dedups):
            if dedup.group.is_replicated:
                found.append(bool(early[g].any() or late[g].any()))
        return early, late

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossing, "_owned_marks", recorded)
        trainer_of(world, replace(CASE, replicated=("item",))).fit(batches_of("some", world))
    return found


def test_nothing_of_replicated_tables_crosses_the_boundary() -> None:
    for found in on_ranks(2, early_and_late):
        assert len(found) > 0
        assert not any(found)
