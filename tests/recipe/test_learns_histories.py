"""Histories from a recipe to a ranking: all schedules give the same bits, losses agree, and the model learns.

Fails, for example, if pipeline.stale is true by default, if evaluate divides by the number of samples instead of the
weight, or if next_items gives each position its own item.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe.bench import learning
from nestpipe.bench.harness.targets import find_misses, load_targets
from nestpipe.distributed import World
from nestpipe.evaluation.evaluate import evaluate
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.recipe.build import build
from nestpipe.recipe.config import Config
from nestpipe.recipe.run import Summary, run
from nestpipe.recipe.text import load_config
from tests.ranks import run_ranks

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = (
    "histories.num_items=120",
    "histories.num_interests=6",
    "histories.num_groups=8",
    "histories.median_length=6",
    "model.dim=16",
    "model.dim_qk=8",
    "model.dim_v=8",
    "model.max_length=12",
    "model.num_negatives=8",
    "train.batch_size=24",
    "evaluate.num_samples=100",
    "evaluate.batch_size=30",
    "store.num_threads=1",
    "runtime.dense_threads=1",
)


def small(kind: str, *settings: str) -> Config:
    return load_config(RECIPES / f"{kind}-histories.toml", (*SMALL, *settings)).resolved(1, 1)


def run_small(world: World, kind: str, *settings: str) -> Summary:
    return run(small(kind, *settings), world)


@pytest.mark.parametrize("kind", ["hstu", pytest.param("fuxi", marks=pytest.mark.slow)])
def test_every_schedule_on_one_rank_and_two(kind: str) -> None:
    settings = ("train.steps=4", "pipeline.num_micro_batches=2", "model.dropout=0.1")
    for num_ranks in (1, 2):
        digests = set()
        for schedule in SCHEDULES:
            summaries = run_ranks(num_ranks, run_small, kind, *settings, f"pipeline.schedule={schedule}")
            digests |= {summary["digest"] for summary in summaries}
            assert all(summary["metrics"] == summaries[0]["metrics"] for summary in summaries)
        assert len(digests) == 1
    metrics = summaries[0]["metrics"]
    assert (metrics["num_samples"], metrics["num_items"]) == (100, 120)
    assert 0 <= metrics["hr_at_10"] <= metrics["hr_at_50"] <= 1


@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_losses_of_training_and_of_evaluation_agree(kind: str, num_micro_batches: int) -> None:
    """Compares the loss of a batch, without dropout, just before it is trained on and in that step."""
    this_run = build(small(kind, f"pipeline.num_micro_batches={num_micro_batches}"), World())
    trainer = this_run.trainer
    trainer.fit(this_run.batches, 5)
    evaluation = evaluate(trainer, [this_run.batches.dataset.samples(5 * 24, 24)])
    assert trainer.fit(this_run.batches, 1).losses == [pytest.approx(evaluation.loss, rel=1e-6)]
    assert evaluation.num_samples == 24


def test_learns_what_users_do() -> None:
    """Trains for seconds, too few to reach the bigram; the benchmark measures that."""
    corpus = ("num_items=240", "num_interests=10", "interests_a_user=1", "num_groups=4", "skew=0.3")
    model = ("model.dim=32", "model.dim_qk=16", "model.dim_v=16", "model.num_negatives=16", "dense_optimizer.lr=0.01")
    length = ("train.steps=200", "train.batch_size=64", "evaluate.num_samples=500")
    record = learning.learn(small("hstu", *(f"histories.{setting}" for setting in corpus), *model, *length))
    assert record["loss_difference"] < 1e-6
    assert record["popularity_hr_10"] < record["bigram_hr_10"] < record["oracle_hr_10"]
    assert 5 * record["popularity_hr_10"] < record["hr_10"] < record["oracle_hr_10"]


def test_every_target_is_answered() -> None:
    config = small("fuxi", "train.steps=2")
    record = learning.learn(replace(config, evaluate=replace(config.evaluate, num_samples=40)))
    misses = find_misses(load_targets("learning"), [record])
    assert not [miss for miss in misses if "no record answers it" in miss]
    assert (record["model"], record["steps"], record["num_held_out"]) == ("fuxi", 2, 40)
