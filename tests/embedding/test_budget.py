"""The formula of device memory: compared with the measured peak and with numbers by hand, and used as a limit.

Fails, for example, if _AmongRanks.moments leaves out the micro-batches whose rows are sent ahead, or
RowPool.growth the previous batch.
"""

import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, Pooled, Sequence, Table, Trainer, World
from nestpipe.data import Jagged
from nestpipe.distributed import RankError
from nestpipe.embedding.cluster import Clustering
from nestpipe.embedding.exchange import codec
from nestpipe.embedding.optim import Adagrad, RowWiseAdagrad
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.store import group_by_owner
from tests.exactness.cases import on_ranks
from tests.ranks import run_ranks

DIM, PER_SAMPLE = 96, 6
PLENTY = 10**12


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class SumOfAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((DIM, 1), 0.1))

    def forward(self, embeddings, inputs) -> Tensor:
        values = (value if isinstance(value, Tensor) else value.values for value in embeddings.values())
        return sum((value @ self.weight).sum() for value in values)


def make_trainer(world: World, schedule: str = "nested", num_micro_batches: int = 1, window: str = "once", **more):
    item, tag = Table("item", DIM, optimizer=Adagrad(0.1)), Table("tag", DIM, optimizer=RowWiseAdagrad(0.1))
    options = {"schedule": schedule, "num_micro_batches": num_micro_batches, "window": window, "check_split": False}
    features = {"items": Sequence(item), "tags": Pooled(tag)}
    return Trainer(
        SumOfAll(), features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), world=world, **options, **more
    )


def batch_of(num_samples: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(num_samples + 1) * PER_SAMPLE
    drawn = torch.rand(2, num_samples * PER_SAMPLE, generator=generator) ** 2 * num_samples * 8
    keys = {name: Jagged(values.long(), offsets) for name, values in zip(("items", "tags"), drawn, strict=True)}
    return Batch(keys, {"age": torch.zeros(num_samples, 2)})


def needed_and_held(world: World, runs: list[tuple[str, int, str]], **more) -> list[tuple[int, int]]:
    results = []
    for run in runs:
        trainer = make_trainer(world, *run, device_budget_bytes=PLENTY, **more)
        result = trainer.fit([batch_of(300, seed * world.size + world.rank) for seed in range(4)])
        assert result.device_bytes is not None
        results.append((result.device_bytes.total, result.peak_device_bytes))
    return results


ALONE = [(schedule, n, "once") for schedule in SCHEDULES for n in (1, 8)]
TOGETHER = [(schedule, 1 if schedule in ("serial", "nested") else 8, "once") for schedule in SCHEDULES]
TOGETHER += [(schedule, 8, "resend") for schedule in SCHEDULES]


@pytest.mark.parametrize(("size", "runs"), [(1, ALONE), (2, TOGETHER)])
def test_within_15_percent_of_the_peak(size: int, runs: list[tuple[str, int, str]]) -> None:
    for results in on_ranks(size, needed_and_held, runs):
        for run, (needed, held) in zip(runs, results, strict=True):
            assert 0.85 < needed / held < 1.15, f"{run}: {needed} by the formula, {held} held"


def rounded(world: World, runs: list[tuple[str, int, str]]) -> list[tuple[int, int]]:
    codec.CHUNK_BYTES = 1 << 14  # as small next to these batches as it is next to real ones
    return needed_and_held(world, runs, row_dtype="bfloat16", gradient_dtype="bfloat16")


@pytest.mark.parametrize("size", [1, 2])
def test_codecs_need_little_more(size: int) -> None:
    """Fails if Codec.copy makes one message of all rows."""
    runs = [("serial", 1, "once"), ("nested", 8, "once")]
    for results in run_ranks(size, rounded, runs):
        for run, (needed, held) in zip(runs, results, strict=True):
            assert 0.85 < needed / held < 1.15, f"{run}: {needed} by the formula, {held} held"


def test_terms_by_hand() -> None:
    """One rank, one table of dim 4 with 4 columns of state, 2 micro-batches: keys 0 and 1, then keys 1 and 2."""
    features = {"items": Pooled(Table("item", 4, optimizer=Adagrad(0.1)))}
    model = nn.Linear(4, 1)
    model.forward = lambda embeddings, inputs: model.weight.sum() * embeddings["items"].sum()  # type: ignore
    trainer = Trainer(
        model,
        features,
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
        schedule="intra",
        num_micro_batches=2,
        device_budget_bytes=PLENTY,
    )
    result = trainer.fit([Batch({"items": Jagged.from_lists([[0, 1], [1, 2]])})])
    assert result.device_bytes is not None
    assert result.device_bytes.terms == {
        "records": 3 * (4 + 4) * 4,
        "stretches": 0,
        "lists": 2 * 2 * (2 * 8 + 2 * 1 + 2 * 8 + 2 * 8),  # 2 batches of 2 parts: positions, firsts, index, offsets
        "kept_rows": 0,
        "rows": 2 * 4 * 4,  # nothing travels, so no rows are sent ahead
        "gradients": (3 + 2) * 4 * 4,
        "messages": 0,
    }


def terms_among_ranks(world: World) -> tuple[dict[str, int], int, int]:
    """Both ranks have a sample with keys 0 .. 9, then one with 5 .. 14. Keys 0 .. 4 are returned first."""
    trainer = make_trainer(world, "intra", 2, clustering=Clustering("none"), device_budget_bytes=PLENTY)
    samples = Jagged.from_lists([list(range(10)), list(range(5, 15))])
    none = Jagged.from_lists([[], []])
    result = trainer.fit([Batch({"items": samples, "tags": none}, {})])
    assert result.device_bytes is not None
    owned = [int(group_by_owner("item", torch.arange(first, 15), 2)[1][world.rank]) for first in (0, 5)]
    return dict(result.device_bytes.terms), *owned


def test_terms_among_ranks_by_hand() -> None:
    """Fails if _AmongRanks leaves out the gradients of entries."""
    row = DIM * 4
    for terms, num_owned, num_owned_last in run_ranks(2, terms_among_ranks):
        assert terms["records"] == num_owned * 2 * row
        assert terms["kept_rows"] == 15 * row
        assert terms["rows"] == 20 * row  # of both micro-batches, while the first is returned
        # Gradients of the rows, summed by the requester, and of both ranks at the owner.
        assert terms["gradients"] == (10 + 15 + 2 * num_owned) * row
        own = num_owned - num_owned_last  # of the keys 0 .. 4
        assert own + 5 >= num_owned_last, "else more is held while the second is returned"
        assert terms["messages"] == ((5 - own) + own) * row  # sent and received; own rows are in no message


def refused(world: World, schedule: str, large_rank: int) -> tuple[str, str, int, int, int]:
    """Trains with a batch on one rank that is too large, as the first and as the third batch. Then continues."""
    trainer = make_trainer(world, schedule, 2, device_budget_bytes=8_000_000)
    sizes = 1000 if world.rank == large_rank else 20
    texts, steps = [], []
    for before in (0, 2):
        batches = [batch_of(20, seed) for seed in range(before)] + [batch_of(sizes, 9), batch_of(20, 10)]
        with pytest.raises((ValueError, RankError)) as error:
            trainer.fit(iter(batches))
        texts.append(str(error.value))
        steps.append(trainer.num_steps)
        if before == 0:
            assert sum(trainer.store.size(table.name) for table in trainer.tables) == 0
    trainer.fit([batch_of(20, 11)])
    return *texts, *steps, trainer.num_steps


@pytest.mark.parametrize("schedule", ["serial", "nested"])
@pytest.mark.parametrize(("size", "large_rank"), [(1, 0), (2, 1)])
def test_too_large_a_batch_is_refused_on_every_rank(schedule: str, size: int, large_rank: int) -> None:
    """Fails if Stages._make_room does not tell other ranks, or checks after slots were added."""
    for rank, (first, third, *steps) in enumerate(on_ranks(size, refused, schedule, large_rank)):
        for text in (first, third):
            assert ("rank 1 failed: ValueError: a batch with" in text) == (rank != large_rank)
            assert "device_budget_bytes, 8.00 MB:" in text
            assert "records (slots x (row + row state)) +" in text
            assert "Take a smaller batch" in text
        assert steps == [0, 2, 3]


def test_no_budget_no_tally() -> None:
    result = make_trainer(World()).fit([batch_of(20, 1)])
    assert (result.device_bytes, result.peak_device_bytes) == (None, 0)


def test_a_budget_is_positive() -> None:
    with pytest.raises(ValueError, match="device_budget_bytes is 0, must be at least 1"):
        make_trainer(World(), device_budget_bytes=0).fit([batch_of(20, 1)])
