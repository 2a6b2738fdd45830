"""Exchange across batches as its users meet it: what switches it off, and what happens when a rank fails."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nestpipe import Pooled, Table, Trainer, World
from nestpipe.distributed import RankError
from nestpipe.optim import SGD, RowOptimizer
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.setup import can_cross
from tests.exactness.cases import Case, SmallModel, make_trainer
from tests.exactness.test_x_across_batches import batches_of
from tests.ranks import run_ranks

CASE = Case("adagrad", "shared", 2)


class CountCalls(RowOptimizer):
    """Keeps something between two calls: a step must call it once."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.num_calls = 0

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        self.num_calls += 1
        rows.sub_(gradient * lr / self.num_calls)


class InParts(SGD):
    """Overrides update, and does not say that a step may call it twice."""

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        rows.sub_(gradient * lr)


def trained(world: World, has_other: bool) -> list[str]:
    """Returns the digests of serial and nested. has_other: the second table has an optimizer that updates in parts."""
    digests = []
    for schedule in ("serial", "nested"):
        other = SGD(0.5) if has_other else CountCalls()
        features = {
            "items": Pooled(Table("item", 5, optimizer=CountCalls(), dtype=torch.float64)),
            "tags": Pooled(Table("tag", 3, optimizer=other, dtype=torch.float64)),
        }
        model = SmallModel({"items": 5, "tags": 3})
        options = {"schedule": schedule, "num_micro_batches": 2, "check_split": False}
        trainer = Trainer(model, features, dense_optimizer=lambda p: torch.optim.Adam(p, 0.01), world=world, **options)
        trainer.fit(batches_of("some", world))
        digests.append(trainer.digest())
    return digests


@pytest.mark.parametrize("has_other", [False, True])
def test_an_optimizer_of_ones_own_is_called_once_a_step(has_other: bool) -> None:
    """Fails if TableGroup.allows_late_gradients is always true."""
    assert not CountCalls().updates_in_parts
    assert not InParts(0.1).updates_in_parts
    assert SGD(0.1).updates_in_parts
    for serial, nested in run_ranks(2, trained, has_other):
        assert serial == nested


def clipped(world: World) -> list[str]:
    digests = []
    for schedule in ("serial", "nested"):
        trainer = make_trainer(world, replace(CASE, schedule=schedule), clip_norm=0.01, clip_rows=True)
        trainer.check_split = False
        trainer.fit(batches_of("some", world))
        digests.append(trainer.digest())
    return digests


def test_clipped_rows_need_all_gradients() -> None:
    """Fails if Trainer.pipeline_options leaves late_gradients on: Step.gradients then refuses."""
    for serial, nested in run_ranks(2, clipped):
        assert serial == nested


def failing_retrieve(world: World) -> tuple[str, int]:
    """The last rank's fourth batch cannot be made resident. Each step ends with a digest, which all ranks make."""
    trainer = make_trainer(world, replace(CASE, schedule="nested"))
    trainer.check_split = False
    calls, gather = [], trainer.store.gather_tables

    def fails(*arguments):
        calls.append(0)
        if len(calls) == 4 and world.rank == world.size - 1:
            raise MemoryError("no memory for this test")
        return gather(*arguments)

    trainer.store.gather_tables = fails
    try:
        trainer.fit(batches_of("none", world), after_step=lambda _: trainer.digest())
    except (MemoryError, RankError) as error:
        return str(error), trainer.num_steps
    return "", trainer.num_steps


def test_a_rank_without_rows_takes_part_until_its_turn() -> None:
    """Fails (it waits for ever) if send_early_rows leaves out a rank whose retrieve has failed."""
    for text, num_steps in run_ranks(2, failing_retrieve, timeout=40):
        assert "no memory for this test" in text
        assert num_steps == 3


def bytes_sent(world: World, cross_batch: bool) -> list[tuple[float, float, float]]:
    """Returns the bytes of rows, gradients and keys that each step has sent to the other rank."""
    trainer = make_trainer(world, replace(CASE, schedule="nested"), cross_batch=cross_batch)
    trainer.check_split = False
    times = trainer.fit(batches_of("some", world)).times
    fields = ("exchanged_row_bytes_per_step", "exchanged_gradient_bytes_per_step", "exchanged_key_bytes_per_step")
    return [tuple(step.sizes[field] for field in fields) for step in times]  # type: ignore[misc]


def test_only_two_bits_a_key_are_added() -> None:
    """Fails if an early row is sent again with its first micro-batch."""
    apart, crossed = run_ranks(2, bytes_sent, False), run_ranks(2, bytes_sent, True)
    assert [[step[:2] for step in rank] for rank in crossed] == [[step[:2] for step in rank] for rank in apart]
    key_bytes = [[sum(step[2] for step in steps) for steps in zip(*ranks, strict=True)] for ranks in (apart, crossed)]
    num_keys = [number / 9 for number in key_bytes[0]]  # 8 bytes, and one of bits
    assert key_bytes[1][0] == key_bytes[0][0]  # the first batch has none before it
    for t in range(1, len(num_keys)):
        added = key_bytes[1][t] - key_bytes[0][t]
        assert 0 < added <= 2 * (1 + 1) + (num_keys[t - 1] + num_keys[t]) / 8  # of each rank: an error, and a part byte


@dataclass
class IssuingWorld:
    has_reductions: bool
    rank: int = 0
    issuer: object = "a lane"


def test_an_issuer_needs_a_reducer() -> None:
    """Fails if can_cross leaves out the issuer."""
    options = PipelineOptions()
    with pytest.warns(UserWarning, match="cross_batch=False switches this warning off"):
        assert not can_cross(IssuingWorld(has_reductions=False), options)  # type: ignore[arg-type]
    assert can_cross(IssuingWorld(has_reductions=True), options)  # type: ignore[arg-type]
    assert not can_cross(IssuingWorld(has_reductions=True), replace(options, cross_batch=False))  # type: ignore[arg-type]
