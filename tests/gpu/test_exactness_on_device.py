"""Tests E1 and E3 on an accelerator: every schedule ends with serial's bits, and with a CPU's rows up to rounding.

Fails if Executor._run does not wait for the marks of its dependencies, or if a kernel sums in the order in which
programs happen to run.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nestpipe import World
from nestpipe.data import Batch
from nestpipe.embedding.optim import SGD
from nestpipe.pipelining import NonFiniteError
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer
from tests.exactness import test_e8_pooled_at_owner
from tests.exactness.cases import OPTIMIZERS, Case, global_batches, make_trainer, on_ranks, share_of, train
from tests.exactness.test_e1_bit_identical import STREAMS, digests, train_some
from tests.exactness.test_e5_replicated import differing, runs_of

CASES = [
    (1, Case("adam", "shared", 4, steps=8)),
    (1, Case("own", "pooled_sum", 1, steps=8)),
    (2, Case("adagrad", "pooled_mean", 5, steps=6)),
    (3, Case("rowwise_adagrad", "sequence", 4, steps=6)),
]


@pytest.mark.parametrize(("size", "case"), CASES, ids=str)
def test_every_schedule_and_window(device: str, size: int, case: Case) -> None:
    digests_by_rank = on_ranks(size, digests, case, device=device)
    assert len({digest for rank_digests in digests_by_rank for digest in rank_digests}) == 1


@pytest.mark.parametrize(("size", "optimizer"), [(1, "adagrad"), (1, "sgd"), (2, "adam"), (4, "rowwise_adagrad")])
def test_hostile_streams(device: str, size: int, optimizer: str) -> None:
    for rank_results in on_ranks(size, train_some, optimizer, 1, device=device):
        for stream, results in rank_results:
            assert len(set(results)) == 1, stream


def test_replicated_tables(device: str) -> None:
    for wrong in on_ranks(2, differing, runs_of(STREAMS[::3]), device=device):
        assert wrong == []


def test_features_that_are_pooled_at_the_owner(device: str) -> None:
    runs = test_e8_pooled_at_owner.runs_of(STREAMS[::3])
    for wrong in on_ranks(2, test_e8_pooled_at_owner.differing, runs, device=device):
        assert wrong == []


@pytest.mark.parametrize("layout", ["pooled_sum", "pooled_mean", "sequence", "shared"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_a_cpu_up_to_rounding(device: str, optimizer: str, layout: str) -> None:
    case = Case(optimizer, layout, 4, steps=20, schedule="nested")
    _, losses, dense, rows = train(World(device=device), case)
    _, cpu_losses, cpu_dense, cpu_rows = train(World(), case)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(cpu_losses))
    for name, value in dense.items():
        torch.testing.assert_close(value, cpu_dense[name], rtol=1e-9, atol=1e-9)
    for name, (keys, key_rows) in rows.items():
        assert torch.equal(keys, cpu_rows[name][0])
        torch.testing.assert_close(key_rows, cpu_rows[name][1], rtol=1e-9, atol=1e-9)


def stop_at_nan(world: World, schedule: str, bad_step: int) -> tuple[str, int, list, list]:
    case = Case("adagrad", "shared", 2, steps=10, schedule=schedule)
    batches = share_of(global_batches(case.steps), world)
    if world.rank == world.size - 1:
        bad = batches[bad_step]
        batches[bad_step] = Batch(bad.keys, {"label": bad.inputs["label"] * float("nan")}, bad.weight)
    trainer = make_trainer(world, case)
    trainer.check_split = False
    with pytest.raises(NonFiniteError) as error:
        trainer.fit(iter(batches))
    rows = [trainer.store.export_piece(table.name, 0, 65536) for table in trainer.tables]
    good = make_trainer(world, replace(case, steps=bad_step))
    good.check_split = False
    good.fit(batches[:bad_step])
    expected = [good.store.export_piece(table.name, 0, 65536) for table in good.tables]
    return str(error.value), trainer.num_steps, rows, expected


@pytest.mark.parametrize("bad_step", [0, 4, 9])
@pytest.mark.parametrize(("size", "schedule"), [(1, "serial"), (1, "nested"), (1, "intra"), (2, "nested")])
def test_rows_are_as_before_a_non_finite_step(device: str, size: int, schedule: str, bad_step: int) -> None:
    for text, num_steps, rows, expected in on_ranks(size, stop_at_nan, schedule, bad_step, device=device):
        assert f"step {bad_step}: a loss or a gradient is not finite" in text
        assert num_steps == bad_step
        for piece, wanted in zip(rows, expected, strict=True):
            assert torch.equal(piece.keys, wanted.keys)
            assert torch.equal(piece.records, wanted.records)
            assert torch.equal(piece.steps, wanted.steps)


def bad_run(world: World) -> Trainer:
    trainer = make_trainer(world, Case("adagrad", "shared", 2, steps=10, schedule="nested"))
    trainer.check_split = False
    return trainer


def bad_batches(bad_step: int) -> list[Batch]:
    batches = global_batches(8)
    bad = batches[bad_step]
    batches[bad_step] = Batch(bad.keys, {"label": bad.inputs["label"] * float("nan")}, bad.weight)
    return batches


def test_a_non_finite_step_is_not_saved(device: str, tmp_path: Path) -> None:
    """Fails if flush does not poll the outcomes of steps."""
    trainer = bad_run(World(device=device))
    with pytest.raises(NonFiniteError, match="step 3: a loss or a gradient is not finite"):
        trainer.fit(bad_batches(3), after_step=lambda _: trainer.save(tmp_path / "save"))
    loaded = bad_run(World(device=device))
    loaded.load(tmp_path / "save")
    assert loaded.num_steps == trainer.num_steps == 3
    assert all(bool(value.isfinite().all()) for value in loaded.model.state_dict().values())


def test_another_error_after_a_non_finite_step(device: str) -> None:
    """Masked steps are not counted. Fails if Pipeline._end does not poll the outcomes of steps."""
    trainer = bad_run(World(device=device))

    def fail(result: FitResult) -> None:
        if trainer.num_steps == 5:
            raise KeyError("no such layer")

    with pytest.raises(KeyError) as error:
        trainer.fit(bad_batches(4), after_step=fail)
    assert trainer.num_steps == 4
    assert any("step 4: a loss or a gradient is not finite" in note for note in error.value.__notes__)


def test_the_batch_at_fault_is_not_repeated(device: str) -> None:
    trainer, batches = bad_run(World(device=device)), iter(bad_batches(3))
    with pytest.raises(NonFiniteError):
        trainer.fit(batches, steps=4)
    assert [len(batch) for batch in trainer.source_of(batches)] == [24] * 4
    with pytest.raises(RuntimeError, match="a step was left halfway"):
        trainer.fit(bad_batches(3))  # its dense parameters are of later steps than its rows


class Doubled(SGD):
    def update(self, rows, state, gradient, step, lr) -> None:
        rows.sub_(gradient, alpha=2 * lr)


def test_a_custom_update(device: str) -> None:
    """A class derived from SGD overrides `update`. Fails if the kernel of SGD runs instead."""
    rows, gradient = torch.ones(3, 4, device=device), torch.ones(3, 4, device=device)
    state, is_masked = torch.empty(3, 0, device=device), torch.zeros((), dtype=torch.bool, device=device)
    Doubled(0.25).apply(rows, state, gradient, 1, is_masked)
    assert rows.unique().tolist() == [0.5]
    Doubled(0.25).apply(rows, state, gradient, 2, ~is_masked)
    assert rows.unique().tolist() == [0.5]
