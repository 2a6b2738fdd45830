"""Batches, models and figures of `bench h200`, which need no accelerator, unlike its measurements."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from nestpipe.bench.h200.data import Shape, make_batches
from nestpipe.bench.h200.models import networks
from nestpipe.bench.h200.models.baselines import DenseStep, PlainStep
from nestpipe.bench.h200.models.measure import fill, make_resident, make_trainer
from nestpipe.bench.h200.models.networks import workloads
from nestpipe.bench.h200.models.workload import Workload, keys_of_ranks
from nestpipe.bench.h200.one_rank import NUM_MICRO_BATCHES, QUICK, DenseOnly, _figures, features_of, spread_keys
from nestpipe.bench.harness.targets import load_targets
from nestpipe.cli.bench import app
from nestpipe.data.batch import Batch
from nestpipe.distributed import World

SHAPE = Shape(batch_size=8, length=16, num_negatives=4, num_distinct=100, overlap=0.3, num_batches=3)


def keys_of(batch: Batch) -> set[int]:
    return {key for jagged in batch.keys.values() for key in jagged.values.tolist()}


def test_numbers_of_distinct_and_shared_keys() -> None:
    """Fails if a batch draws its shared keys from itself, or some distinct keys do not occur."""
    batches = make_batches(SHAPE, num_keys=1000)
    spread_keys(batches, 20)
    for number, batch in enumerate(batches):
        assert len(keys_of(batch)) == 100
        assert len(keys_of(batch) & keys_of(batches[number - 1])) == 30
        assert [len(jagged.values) for jagged in batch.keys.values()] == [8 * 16, 8, 8 * 4]
        assert max(keys_of(batch)) < 20_000
        assert all(key % 20 == 0 for key in keys_of(batch))


def test_too_few_keys() -> None:
    with pytest.raises(ValueError, match="150 keys are too few for 3 batches of 70 new ones each"):
        make_batches(SHAPE, num_keys=150)


@pytest.mark.parametrize("num_parts", [1, NUM_MICRO_BATCHES])
def test_dense_only_runs_split_and_unsplit(num_parts: int) -> None:
    """Both train all samples on all distinct rows. Fails if DenseOnly always splits into NUM_MICRO_BATCHES."""
    (shape,) = QUICK.shapes
    batches = make_batches(shape, QUICK.small_rows)
    dense = DenseOnly(World(), QUICK, shape, features_of(QUICK.dim), batches, num_parts)
    for batch, rows in zip(dense.batches, dense.rows, strict=True):
        assert len(batch.num_samples) == len(rows) == num_parts
        assert sum(batch.num_samples) == shape.batch_size
        assert max(map(len, rows)) <= shape.num_distinct <= sum(map(len, rows))
    before = [parameter.clone() for parameter in dense.model.parameters()]
    dense._step(dense.batches[0], dense.rows[0])
    assert any(not torch.equal(a, b) for a, b in zip(before, dense.model.parameters(), strict=True))


def test_a_step_is_compared_with_the_dense_model_split_and_unsplit() -> None:
    """Round by round. Fails if step_over_dense_unsplit divides by the split run."""
    times = {"serial": [20.0, 30.0], "inter": [16.0, 25.0], "nested": [12.0, 24.0]}
    rounds = {name: [{"step_ms": t, "exposed_lookup_ms": t / 4} for t in step_ms] for name, step_ms in times.items()}
    rounds |= {"dense": [{"step_ms": 10.0}] * 2, "dense_unsplit": [{"step_ms": 8.0}] * 2}
    figures = {name: _figures(name, rounds) for name in times}
    for fields in figures.values():
        assert (fields["dense_only_ms"], fields["dense_unsplit_ms"]) == (10.0, 8.0)
    nested = figures["nested"]
    assert (nested["step_over_dense_only"], nested["step_over_dense_unsplit"]) == (pytest.approx(1.8), 2.25)
    assert (nested["step_over_dense_unsplit_low"], nested["step_over_dense_unsplit_high"]) == (1.5, 3.0)
    assert "step_over_dense_unsplit" not in figures["serial"] | figures["inter"]


def small_workload(name: str) -> Workload:
    (workload,) = (workload for workload in workloads() if workload.name == name)
    return replace(workload, num_rows=50, batch_size=2, resident_share=None)


@pytest.mark.parametrize("name", [workload.name for workload in workloads() if workload.name != "dlrm-10"])
def test_models_train_and_so_do_their_baselines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the embeddings of a baseline have no gradients, if a key has no row in the table, or if the pool is not
    preloaded with the hottest keys."""
    for size, value in (("LENGTH", 16), ("NUM_NEGATIVES", 8), ("WIDTH", 32)):  # of the transformer
        monkeypatch.setattr(networks, size, value)
    small, world = small_workload(name), World()
    batches, trainer = small.batches(2), make_trainer(world, small, "nested")
    fill(trainer.store, trainer.tables, small.num_rows)
    make_resident(trainer, small)
    assert trainer.fit(batches).losses[0] > 0
    assert all(trainer.store.size(table.name) == 50 for table in trainer.tables)
    for step in (DenseStep(small, batches[0], world.device), PlainStep(small, batches, world.device)):
        for parts in (step._dense.model, getattr(step, "_tables", step._dense.model)):
            before = [parameter.clone() for parameter in parts.parameters()]
            step()
            assert any(not torch.equal(a, b) for a, b in zip(before, parts.parameters(), strict=True))


def test_keys_are_skewed_and_the_same_in_every_batch() -> None:
    """Fails if every batch scatters its hot keys anew: nothing would stay resident."""
    one, other = replace(workloads()[0], num_rows=10_000, batch_size=500).batches(2)
    hottest = keys_of_ranks(torch.arange(10), 10_000)
    for batch in (one, other):
        assert torch.isin(batch.keys["t000"].values, hottest).float().mean() > 0.1


def test_an_unknown_part(tmp_path) -> None:
    done = CliRunner().invoke(app, ["h200", "--part", "two-ranks", "--json", str(tmp_path / "x.json")])
    assert done.exit_code == 2
    assert "must be one of one-rank, pool, stages, robustness, compiled, models, four-ranks" in " ".join(
        done.output.replace("│", " ").split()
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerator")
def test_refused_without_an_accelerator(tmp_path) -> None:
    done = CliRunner().invoke(app, ["h200", "--part", "stages", "--json", str(tmp_path / "x.json"), "--quick"])
    assert done.exit_code == 2
    assert "needs an accelerator" in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("part", ["one-rank", "four-ranks", "pool", "stages", "robustness", "models"])
def test_each_part_can_miss_a_target(part: str) -> None:
    assert len(load_targets(f"h200-{part}")) >= 2
