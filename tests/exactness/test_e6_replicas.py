"""E6: with several sharding groups every schedule has the bits of serial, replicas stay equal, to the bit, and the
result is that of one group, up to rounding.

Fails if a rank adds its own sums as they are, without the codec (`PLAIN.copy` in sum_over_replicas: replicas differ
with rounded gradients; see also tests/pipelining/test_replicas.py), if odd replicas add in reverse order (`len(places)
- 1 - group_by_row(places.flip(0), ...)` in replica_sums._group; found with three groups), if a row is early although
another group's batch has its key (`early | ~torch.isin(places, before.union.positions)` in crossing._owned_marks), if
owners know the keys of their own group only (without _with_unions in route_keys), if a group sends the sums of other
keys than its own (`is_own[:] = True` in plan._group_returns), if a late sum is not exchanged (without the call of
`_over_replicas` in DistributedBatch.return_late_gradients), if every rank of a replica group counts in a norm
(`gradients` of all ranks in Step.squared_gradient_norm), if ranks of all groups save rows (without `mesh.replica > 0`
in Save._begin_rows), or if a digest counts every replica (without `mesh.replica == 0` in digest).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from nestpipe import Trainer, World
from nestpipe.embedding.exchange import distributed
from nestpipe.evaluation.evaluate import evaluate
from nestpipe.pipelining.schedule import SCHEDULES
from tests.exactness.cases import OPTIMIZERS, Case, global_batches, share_of
from tests.exactness.test_e1_bit_identical import STREAMS, stream_batches
from tests.exactness.test_e2_other_splits import assert_close
from tests.exactness.test_x_across_batches import EVENTS, NUM_BATCHES, batches_of, trainer_of
from tests.ranks import run_ranks

Codecs = tuple[str | None, str | None]
"""Forms of rows and of gradients in messages."""
Run = tuple[str, Codecs, Case]
"""Stream, forms in messages, and settings."""

WAYS = [*((schedule, True) for schedule in SCHEDULES), ("nested", False)]
"""Schedules, and whether they exchange across batches."""
CODECS: list[Codecs] = [(None, None), ("bfloat16", "bfloat16"), (None, "int8"), ("float16", None)]
LAYOUTS = [("shared", ()), ("pooled_mean", ("tag",)), ("sequence", ()), ("pooled_sum", ("item", "tag"))]
"""Layouts of the features, and the tables that are replicated."""


def run_on(size: int, replicas: int, function: Callable, *arguments: object) -> list:
    """Returns function(world, *arguments) of each rank, in `replicas` sharding groups."""
    return run_ranks(size, function, *arguments, replicas=replicas)


def are_equal(trainer: Trainer) -> bool:
    """Returns whether the rows of this rank, with their state, are those of its whole replica group."""
    own = " ".join(str(trainer.store.digest_part(table.name)) for table in trainer.tables)
    by_rank = trainer.world.control.share_text(own)
    return len({by_rank[rank] for rank in trainer.world.mesh.replica_group}) == 1


def trained(world: World, run: Run, cross_batch: bool = True) -> tuple[str, list[float], bool]:
    stream, (rows, gradients), case = run
    trainer = trainer_of(world, case, row_dtype=rows, gradient_dtype=gradients, cross_batch=cross_batch)
    losses = trainer.fit(stream_batches(stream, world)).losses
    return trainer.digest(), losses, are_equal(trainer)


def differing(world: World, runs: list[Run], num_ways: int) -> list[tuple[Run, str, bool]]:
    """Returns the runs that do not give the result of serial, or whose replicas differ. num_ways: those of each run;
    the next run begins with another one."""
    wrong = []
    for number, (stream, codecs, case) in enumerate(runs):
        expected = trained(world, (stream, codecs, case))
        if not expected[2]:
            wrong.append(((stream, codecs, case), "serial", True))
        for schedule, cross_batch in [WAYS[(number + i) % len(WAYS)] for i in range(num_ways)]:
            run = stream, codecs, replace(case, schedule=schedule)
            if trained(world, run, cross_batch) != expected:
                wrong.append((run, schedule, cross_batch))
    return wrong


def runs_of(streams: list[str], first: int) -> list[Run]:
    """Combines each stream with other settings than the one before."""
    sizes, methods, optimizers = cycle((1, 4, 2, 3, 1)), cycle(("spectral", "none", "minhash")), list(OPTIMIZERS)
    runs = []
    for number, stream in enumerate(streams, start=first):
        (layout, names), codecs, optimizer = LAYOUTS[number % 4], CODECS[number * 3 // 4 % 4], optimizers[number % 5]
        if optimizer == "own":  # a row optimizer that may need all rows at once, as replicated tables refuse
            names = ()
        window = "resend" if codecs == (None, None) and number % 3 == 1 else "once"
        dtype = torch.float32 if number % 3 == 2 else torch.float64
        case = Case(optimizer, layout, next(sizes), window, method=next(methods), replicated=names, dtype=dtype)
        runs.append((stream, codecs, case))
    return runs


@pytest.mark.parametrize(
    ("size", "replicas", "num_ways"),
    [
        (4, 2, 2),
        *(pytest.param(size, m, 5, marks=pytest.mark.slow) for size, m in ((2, 2), (3, 3), (4, 2), (4, 4), (6, 3))),
    ],
    ids=str,
)
def test_streams(size: int, replicas: int, num_ways: int) -> None:
    """Serial, inter, intra and nested, with and without exchange across batches, on hostile streams of keys."""
    streams = STREAMS[::2] if num_ways == 2 else STREAMS * 2
    for wrong in run_on(size, replicas, differing, runs_of(streams, first=size), num_ways):
        assert wrong == []


def rows_of(world: World, case: Case, clips: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Returns the losses, and the keys and rows of all tables."""
    trainer = trainer_of(world, case, clip_norm=0.02 if clips else None, clip_rows=clips)
    losses = trainer.fit(share_of(global_batches(12), world)).losses
    exported = [trainer.export_embedding(table.name) for table in trainer.tables]
    return losses, [tensor.detach() for keys, rows in exported for tensor in (keys, rows.weight)]


@pytest.mark.parametrize(
    ("schedule", "optimizer", "clips"),
    [
        ("nested", "sgd", True),
        *(pytest.param("nested", name, False, marks=pytest.mark.slow) for name in OPTIMIZERS),
        pytest.param("serial", "adagrad", True, marks=pytest.mark.slow),
        pytest.param("serial", "own", False, marks=pytest.mark.slow),
    ],
)
def test_the_result_of_one_group(schedule: str, optimizer: str, clips: bool) -> None:
    """Up to rounding: sums are added group by group. The norm of all gradients counts each row once."""
    case = Case(optimizer, "pooled_mean", 2, schedule=schedule)
    expected_losses, expected = run_on(2, 1, rows_of, case, clips)[0]
    for replicas in (2, 4):
        for losses, tensors in run_on(4, replicas, rows_of, case, clips):
            assert losses == pytest.approx(expected_losses, rel=1e-10)
            assert [len(tensor) for tensor in tensors] == [len(tensor) for tensor in expected]
            for got, wanted in zip(tensors, expected, strict=True):
                assert_close(got, wanted)


# ---- what happens at a boundary between two batches ----


def wanderers(world: World) -> list[tuple[str, int]]:
    """Returns the overlaps of batches for which nested has other bits than serial."""
    wrong = []
    for shared, num_micro_batches in (("some", 1), ("most", 2)):
        digests = set()
        for schedule in ("serial", "nested"):
            trainer = trainer_of(world, Case("adam", "shared", num_micro_batches, schedule=schedule))
            trainer.fit(batches_of(shared, world))
            digests.add(f"{trainer.digest()} {are_equal(trainer)}")
        if len(digests) > 1 or "False" in digests.pop():
            wrong.append((shared, num_micro_batches))
    return wrong


def test_keys_that_move_from_one_group_to_another() -> None:
    """A row that another group needed for the batch before must not be sent early."""
    assert run_on(4, 2, wanderers) == [[]] * 4


def interrupted(world: World, event: str, folder: Path, moments: range) -> list[tuple[int, bool]]:
    results = []
    for at in moments:
        case, digests = Case("rowwise_adagrad" if event == "settings" else "adam", "shared", 2), []
        for schedule in ("serial", "nested"):
            trainer = trainer_of(world, replace(case, schedule=schedule))
            seen = EVENTS[event](trainer, batches_of("some", world), at, folder)
            digests.append([*seen, trainer.digest(), str(trainer.num_steps), str(are_equal(trainer))])
        results.append((at, digests[0] == digests[1] and digests[0][-1] == "True"))
    return results


MOMENTS = range(1, NUM_BATCHES - 1)


@pytest.mark.parametrize(
    ("event", "moments"),
    [
        *((name, MOMENTS[1:2]) for name in ("non-finite", "all fail")),
        *(pytest.param(name, MOMENTS, marks=pytest.mark.slow) for name in EVENTS),
    ],
)
def test_an_event_between_two_steps(event: str, moments: range, tmp_path: Path) -> None:
    """A rank of one group fails, or has a gradient that is not finite: all groups agree."""
    for results in run_on(4, 2, interrupted, event, tmp_path, moments):
        assert [at for at, is_equal in results if not is_equal] == []


def saved_at(world: World, path: Path, steps: int, case: Case) -> tuple[str, str, bool, list[int]]:
    """Trains on from a checkpoint, if there is one, and saves. Returns the digests before and after, whether replicas
    are equal, and this rank's numbers of rows when it has loaded."""
    trainer = trainer_of(world, case)
    if path.exists():
        trainer.load(path)
    before, sizes = trainer.digest(), [trainer.store.size(table.name) for table in trainer.tables]
    share = slice(world.rank * 24 // world.size, (world.rank + 1) * 24 // world.size)
    trainer.fit([batch[share] for batch in global_batches(steps)[trainer.num_steps :]])
    trainer.save(path)
    return before, trainer.digest(), are_equal(trainer), sizes


MESHES = [(4, 2), (2, 1), (4, 4), (3, 1), (2, 2)]
"""Ranks and sharding groups, one after the other."""


@pytest.mark.parametrize(
    ("meshes", "replicated"),
    [(MESHES[:3], ()), *(pytest.param(MESHES, names, marks=pytest.mark.slow) for names in ((), ("tag",)))],
)
def test_resumes_with_other_groups(meshes: list[tuple[int, int]], replicated: tuple[str, ...], tmp_path: Path) -> None:
    """A checkpoint has each row once. What is loaded is what was saved, and each group has all rows."""
    case = Case("adam", "pooled_mean", 2, schedule="nested", replicated=replicated)
    saved = None
    for number, (size, replicas) in enumerate(meshes, start=1):
        results = run_on(size, replicas, saved_at, tmp_path / "saved", 2 * number, case)
        assert saved is None or {before for before, *_ in results} == {saved}
        assert all(equal for _, _, equal, _ in results)
        num_rows = torch.tensor([sizes for *_, sizes in results]).view(replicas, size // replicas, -1).sum(1)
        assert (num_rows == num_rows[0]).all()
        assert saved is None or (num_rows > 0).all()
        saved = results[0][1]


# ---- the rows of a rank ----


def failing_step(world: World, schedule: str, max_rows: int) -> int:
    """Returns the step at which a table is full on some rank."""
    trainer = trainer_of(world, Case("adam", "shared", 2, schedule=schedule))
    for table in trainer.tables:
        object.__setattr__(table, "max_rows", max_rows)
    trainer.store = trainer.empty_store()
    with pytest.raises(Exception, match=r"more than its max_rows"):
        trainer.fit(batches_of("none", world))
    return trainer.num_steps


def test_max_rows_counts_the_keys_of_all_groups() -> None:
    """A rank has one of two shards, in one group of two ranks and in two such groups."""
    for max_rows in (12, 40):
        expected = run_on(2, 1, failing_step, "serial", max_rows)
        assert (expected[0] > 0) == (max_rows == 40)
        for schedule in ("serial", "nested"):
            assert run_on(4, 2, failing_step, schedule, max_rows) == expected * 2


def rows_and_destinations(world: World, schedule: str) -> tuple[set[int], set[int], int]:
    """Returns the ranks to which this one sends rows, and those to which it sends gradients and sums; and how many keys
    were early or late."""
    sent: dict[str, set[int]] = {"rows": set(), "gradients": set()}
    for name in sent:
        channel = getattr(world, name)

        def all_to_all(*arguments, name=name, original=channel.all_to_all):
            sent[name] |= {rank for rank, size in enumerate(arguments[1]) if size > 0}
            original(*arguments)

        channel.all_to_all = all_to_all
    num_crossing = 0
    with pytest.MonkeyPatch.context() as patch:

        def compared(*arguments, original=distributed.compare):
            nonlocal num_crossing
            crossing = original(*arguments)
            num_crossing += sum(int(marks.owned.sum()) for marks in (*crossing.early, *crossing.late))
            return crossing

        patch.setattr(distributed, "compare", compared)
        trainer_of(world, Case("adam", "shared", 2, schedule=schedule)).fit(batches_of("some", world))
    return sent["rows"] - {world.rank}, sent["gradients"] - {world.rank}, num_crossing


def test_rows_stay_in_their_group() -> None:
    """And sums go to the ranks with the same shard alone."""
    for schedule in ("serial", "nested"):
        results = run_on(4, 2, rows_and_destinations, schedule)
        for rank, (rows, gradients, num_crossing) in enumerate(results):
            in_group, replica = {0: 1, 1: 0, 2: 3, 3: 2}[rank], (rank + 2) % 4
            assert rows == {in_group}
            assert gradients == {in_group, replica}
            assert (num_crossing > 0) == (schedule == "nested")


def used_elsewhere(world: World, path: Path) -> tuple[str, list, list, str]:
    """Loads a checkpoint, evaluates, exports, imports rows and exports again."""
    trainer = trainer_of(world, Case("adam", "pooled_mean", 1, replicated=("tag",)))
    trainer.load(path)
    evaluation = evaluate(trainer, share_of(global_batches(16)[12:], world))
    before = [trainer.export_embedding(name) for name in ("item", "tag")]
    trainer.import_rows("item", torch.arange(0, 80, 3), torch.full((27, 5), 0.5, dtype=torch.float64))
    keys, rows = trainer.export_embedding("item")
    exported = [[keys.tolist(), rows.weight.tolist()] for keys, rows in before]
    numbers = evaluation.num_samples, evaluation.num_untrained_keys, round(evaluation.loss, 12)
    return str(numbers), exported, [keys.tolist(), rows.weight.tolist()], trainer.digest()


def test_everything_else_sees_each_row_once(tmp_path: Path) -> None:
    """Evaluation, export, import and digest give what one group gives."""
    case = Case("adam", "pooled_mean", 1)
    run_on(2, 1, saved_at, tmp_path / "saved", 6, case)
    expected = run_on(2, 1, used_elsewhere, tmp_path / "saved")[0]
    assert run_on(4, 2, used_elsewhere, tmp_path / "saved") == [expected] * 4
