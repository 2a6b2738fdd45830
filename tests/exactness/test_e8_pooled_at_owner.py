"""E8: features that are pooled at the owner give the bits of serial in every schedule, and the result of features that
are pooled at the requester, up to rounding.

Fails if gradients of keys in bags are late (without `late[before.bags.keys] = False` in crossing._owned_marks), if they
are added to the rows of all keys instead of those that are not late (without the searchsorted in plan._bag_returns), if
an owner adds up the sums of another micro-batch (`owner.fill(0)` in DistributedBatch._write_rows), if a world of one
has bags (`pools_at_owner=True` in Pipeline), or if the owner does not check its sums (`torch.inf` in
DistributedBatch._sum_bags).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from nestpipe import Batch, Trainer, World
from nestpipe.data import Jagged
from nestpipe.embedding import crossing
from nestpipe.embedding.cluster import Clustering
from nestpipe.evaluation.evaluate import evaluate
from nestpipe.pipelining import NonFiniteError
from nestpipe.pipelining.schedule import SCHEDULES
from tests.embedding.test_exchange import as_on_a_device
from tests.exactness.cases import Case, features_of, global_batches, make_trainer, on_ranks, share_of, train
from tests.exactness.test_e2_other_splits import assert_all_close
from tests.exactness.test_e5_replicated import CODECS, OPTIMIZERS, WAYS
from tests.exactness.test_x_across_batches import EVENTS, NUM_BATCHES
from tests.exactness.test_x_across_batches import stream as moving_stream
from tests.streams import key_streams

PLACES = [
    ("shared", ("items",), ()),
    ("pooled_mean", ("tags",), ("item",)),
    ("pooled_sum", ("items", "tags"), ()),
    ("shared", ("items",), ()),
]
"""Layouts of the features, those that are pooled at the owner, and tables that are replicated. In "shared", the other
feature uses the same table."""
STREAMS = [*key_streams(), "one_rank_empty"]

Run = tuple[str, tuple[str | None, str | None], Case]
"""Stream, forms in messages, and settings."""


def trainer_of(world: World, case: Case, **options: object) -> Trainer:
    trainer = make_trainer(world, case, **options)
    trainer.check_split = False
    return trainer


def bag_batch(keys: torch.Tensor) -> Batch:
    """Returns a batch with bags of 0 to 5 keys in both features. One has weights in batches with an even first key."""
    lengths = torch.tensor([3, 0, 5, 1, 2])[torch.arange(len(keys)) % 5]
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).clamp(max=len(keys))
    offsets = torch.cat([bounds[bounds < len(keys)], torch.tensor([len(keys)])])
    weights = 0.5 + (keys % 7).double() if len(keys) > 0 and keys[0] % 2 == 0 else None
    tags = torch.where(keys % 5 == 0, -7, keys % 60)
    labels = (torch.arange(len(offsets) - 1) % 2).double()
    return Batch({"items": Jagged(keys, offsets, weights), "tags": Jagged(tags, offsets)}, {"label": labels})


def stream_batches(stream: str, world: World) -> list[Batch]:
    """Returns this rank's share of a stream. Rank 1 has no data in "one_rank_empty"."""
    batch_keys = key_streams()["random" if stream == "one_rank_empty" else stream]
    if stream == "one_rank_empty" and world.rank == 1:
        return []
    if stream == "ragged_end" and world.rank > 0:
        batch_keys = batch_keys[: -world.rank]
    return [bag_batch(keys[world.rank :: world.size].contiguous()) for keys in batch_keys]


def trained(world: World, run: Run, cross_batch: bool = True) -> tuple[str, list[float]]:
    stream, (rows, gradients), case = run
    trainer = trainer_of(world, case, row_dtype=rows, gradient_dtype=gradients, cross_batch=cross_batch)
    losses = trainer.fit(stream_batches(stream, world)).losses
    return trainer.digest(), losses


def differing(world: World, runs: list[Run], num_ways: int = len(WAYS)) -> list[tuple[Run, bool]]:
    """Returns the runs that do not give the result of serial. num_ways: those of each run; the next run begins with
    another one."""
    wrong = []
    for number, (stream, codecs, case) in enumerate(runs):
        expected = trained(world, (stream, codecs, case))
        for schedule, cross_batch in [WAYS[(number + i) % len(WAYS)] for i in range(num_ways)]:
            windows = ("once",) if codecs != (None, None) else ("once", "resend")
            run = stream, codecs, replace(case, schedule=schedule, window=windows[(number // 2) % len(windows)])
            if trained(world, run, cross_batch) != expected:
                wrong.append((run, cross_batch))
    return wrong


def runs_of(streams: list[str], first: int = 0) -> list[Run]:
    """Combines each stream with other settings than the one before."""
    sizes, dtypes = cycle((4, 1, 2, 3, 1)), cycle((torch.float64, torch.float32))
    runs = []
    for number, stream in enumerate(streams, start=first):
        (layout, names, replicated), codecs = PLACES[number % 4], CODECS[number // 2 % 4]
        places = {"at_owner": names, "replicated": replicated}
        case = Case(OPTIMIZERS[number % 4], layout, next(sizes), dtype=next(dtypes), **places)
        runs.append((stream, codecs, case))
    return runs


@pytest.mark.parametrize(
    ("size", "streams", "num_ways"),
    [
        (2, STREAMS[::2], 3),
        (3, STREAMS[1::2], 2),
        *(pytest.param(n, STREAMS, 5, marks=pytest.mark.slow) for n in (2, 3, 4)),
    ],
    ids=["2-some", "3-some", "2", "3", "4"],
)
def test_streams(size: int, streams: list[str], num_ways: int) -> None:
    """Serial, inter, intra and nested, with and without exchange across batches, on hostile streams of keys."""
    for wrong in on_ranks(size, differing, runs_of(streams, first=size), num_ways):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_streams_everywhere(size: int, num_micro_batches: int) -> None:
    """All streams, with all layouts and forms."""
    runs = [
        (stream, codecs, Case(optimizer, layout, num_micro_batches, at_owner=names, replicated=replicated))
        for (layout, names, replicated), codecs, optimizer in zip(PLACES, CODECS, OPTIMIZERS, strict=True)
        for stream in STREAMS
    ]
    for wrong in on_ranks(size, differing, runs, timeout=290):
        assert wrong == []


# ---- against features that are pooled at the requester, and against one rank ----


def train_both(world: World, case: Case) -> list:
    """Trains with pooling at the requester, at the owner, and at the owner in other micro-batches."""
    parts = {"num_micro_batches": 5, "schedule": "nested"}
    return [train(world, run) for run in (replace(case, at_owner=()), case, replace(case, **parts))]


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, Case("adagrad", "shared", 1, steps=25, at_owner=("items",))),
        (3, Case("adam", "pooled_mean", 2, steps=15, at_owner=("items", "tags"))),
        *(
            pytest.param(size, Case(optimizer, layout, 3, steps=100, at_owner=names), marks=pytest.mark.slow)
            for size, optimizer, (layout, names, _) in zip((2, 3, 4, 4), OPTIMIZERS, PLACES, strict=True)
        ),
    ],
    ids=str,
)
def test_the_result_of_pooling_at_the_requester(size: int, case: Case) -> None:
    """Bags are ragged, weighted and padded, some are empty. The digests differ: sums are rounded in other places."""
    for results in on_ranks(size, train_both, case):
        assert_all_close(results)
        assert results[1][0] != results[0][0]


def alone(world: World, case: Case) -> str:
    return train(world, case)[0]


def test_a_world_of_one_pools_where_it_is() -> None:
    case = Case("adam", "pooled_sum", 2, steps=4, at_owner=("items", "tags"))
    assert on_ranks(1, alone, case) == on_ranks(1, alone, replace(case, at_owner=()))


# ---- what happens at a boundary ----


def saved(trainer: Trainer, batches: list[Batch], at: int, folder: Path) -> list[str]:
    """Saves in the middle of a run, and goes on from there with another trainer."""
    path = folder / f"{trainer.options.schedule}-{at}"

    def save(_: object) -> None:
        if trainer.num_steps == at:
            trainer.save(path)

    trainer.fit(batches, after_step=save)
    other = trainer_of(trainer.world, replace(AT_OWNER, schedule=trainer.options.schedule))
    other.load(path)
    digests = [other.digest()]
    other.fit(batches[at:])
    return [*digests, other.digest(), str(other.digest() == trainer.digest())]


AT_OWNER = Case("adam", "shared", 2, at_owner=("items",))


def moving_batches(world: World) -> list[Batch]:
    """Consecutive batches share some keys."""
    return [bag_batch(keys[world.rank :: world.size].contiguous()) for keys in moving_stream("some")]


def interrupted(world: World, event: str, folder: Path) -> list[tuple[int, bool]]:
    results = []
    for at in range(1, NUM_BATCHES - 1):
        case = replace(AT_OWNER, optimizer="rowwise_adagrad" if event == "settings" else "adam")
        digests = []
        for schedule in ("serial", "nested"):
            trainer = trainer_of(world, replace(case, schedule=schedule))
            happens = saved if event == "save" else EVENTS[event]
            seen = happens(trainer, moving_batches(world), at, folder)
            assert "False" not in seen
            digests.append([*seen, trainer.digest(), str(trainer.num_steps)])
        results.append((at, digests[0] == digests[1]))
    return results


QUICK_EVENTS = {"save", "non-finite"}


@pytest.mark.parametrize(
    "event", [pytest.param(name, marks=() if name in QUICK_EVENTS else pytest.mark.slow) for name in EVENTS]
)
def test_an_event_at_every_step(event: str, tmp_path: Path) -> None:
    """Saves are continued, steps that are not finite change no row, and so on; nested against serial."""
    for results in on_ranks(2, interrupted, event, tmp_path):
        assert [at for at, is_equal in results if not is_equal] == []


def late_keys_of_bags(world: World) -> tuple[int, int]:
    """Returns the owned keys that were late, and those of them that a bag has."""
    found = [0, 0]
    owned_marks: Callable = crossing._owned_marks

    def recorded(earlier, later, has_late, num_threads):
        early, late = owned_marks(earlier, later, has_late, num_threads)
        for marks, dedup in zip(late, earlier.owner_dedups, strict=True):
            found[0] += int(marks.sum())
            found[1] += int(marks[dedup.bags.keys].sum())
        return early, late

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossing, "_owned_marks", recorded)
        trainer_of(world, replace(AT_OWNER, schedule="nested")).fit(moving_batches(world))
    return found[0], found[1]


def test_no_gradient_of_a_key_in_a_bag_is_late() -> None:
    for num_late, num_in_bags in on_ranks(2, late_keys_of_bags):
        assert num_late > 0
        assert num_in_bags == 0


# ---- sums that are not finite ----


class Steep(torch.nn.Module):
    """The loss is 0. The gradients of partial sums are finite, but not that of a key that all bags have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, embeddings, inputs):
        return sum(
            (
                ((value - value.detach()) * inputs["slope"][:, None].to(value.dtype)).sum()
                for value in embeddings.values()
            ),
            self.weight,
        )


def overflowing(world: World, schedule: str, num_keys: int) -> tuple[bool, bool]:
    """Every bag has one key, num_keys times. The second batch's gradients are large. Returns whether the step failed,
    and whether its rows are as before."""
    case = replace(AT_OWNER, layout="pooled_sum", at_owner=("items", "tags"), schedule=schedule, dtype=torch.float32)
    trainer = Trainer(
        Steep(),
        features_of(case),
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.0),
        world=world,
        schedule=schedule,
        num_micro_batches=2,
        check_split=False,
        clustering=Clustering("none"),
    )
    largest = torch.finfo(torch.float32).max
    offsets = torch.arange(0, 4 * num_keys + 1, num_keys)
    batches = [
        Batch(
            {name: Jagged(torch.full((4 * num_keys,), 7), offsets) for name in ("items", "tags")},
            {"slope": torch.full((4,), slope, dtype=torch.float64)},
            weight=1.0,
        )
        for slope in (1e-3, largest / (4 * world.size))
    ]
    trainer.fit(batches[:1])
    before, has_failed = trainer.digest(), False
    try:
        trainer.fit(batches[1:])
    except NonFiniteError:
        has_failed = True
    return has_failed, trainer.digest() == before


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_the_owner_tells_that_a_sum_is_not_finite(schedule: str) -> None:
    """8 samples of 2 ranks; the gradient of each is below the limit of a requester."""
    assert on_ranks(2, overflowing, schedule, 8) == [(True, True)] * 2


# ---- everything else ----


def digests_by(world: World, way: str) -> list[str]:
    """Returns digests with groups that have rows and bags, and with groups that have bags alone."""
    with pytest.MonkeyPatch.context() as patch:
        if way != "host":
            as_on_a_device(patch, staged=way == "staged")
        digests = []
        for case in (AT_OWNER, Case("adagrad", "pooled_mean", 1, at_owner=("items", "tags"))):
            trainer = trainer_of(world, replace(case, schedule="nested"))
            trainer.fit(share_of(global_batches(4), world))
            digests.append(trainer.digest())
        return digests


def test_memory_of_a_device_gives_the_same_bits() -> None:
    """Made of CPU tensors, with the plain form of its kernels; also with messages in host memory."""
    host = on_ranks(2, digests_by, "host")
    assert on_ranks(2, digests_by, "device") == host
    assert on_ranks(2, digests_by, "staged") == host


def norm_and_evaluation(world: World, at_owner: tuple[str, ...], freezes: bool) -> tuple[list[float], int, int]:
    """Trains with clipping of the rows' norm, and evaluates. Returns also the bytes of rows and gradients."""
    case = Case("adam", "pooled_mean", 2, schedule="nested", at_owner=at_owner)
    trainer = trainer_of(world, case, clip_norm=0.5, clip_rows=True)
    for feature in trainer.features.values():
        object.__setattr__(feature.table, "frozen", freezes)
    trainer.store = trainer.empty_store()
    batches = share_of(global_batches(5), world)
    result = trainer.fit(batches)
    sizes = [sum(t.sizes[f"exchanged_{kind}_bytes_per_step"] for t in result.times) for kind in ("row", "gradient")]
    return [*result.losses, evaluate(trainer, batches).loss], int(sizes[0]), int(sizes[1])


@pytest.mark.parametrize("freezes", [False, True])
def test_clipped_frozen_and_evaluated(freezes: bool) -> None:
    expected = on_ranks(2, norm_and_evaluation, (), freezes)
    results = on_ranks(2, norm_and_evaluation, ("items", "tags"), freezes)
    for (losses, rows, gradients), (others, *_) in zip(results, expected, strict=True):
        assert losses == pytest.approx(others, rel=1e-10)
        assert rows > 0
        assert (gradients > 0) != freezes


def losses_of_schedules(world: World) -> list[list[float]]:
    case = Case("adam", "pooled_sum", 2, at_owner=("tags",))
    batches = share_of(global_batches(3), world)
    return [trainer_of(world, replace(case, schedule=schedule)).fit(batches).losses for schedule in SCHEDULES]


def test_losses_are_those_of_serial() -> None:
    for losses in on_ranks(2, losses_of_schedules):
        assert losses == [losses[0]] * len(SCHEDULES)
