"""`bench exchange --part quality`: what a model of histories learns with each form of rows and gradients in messages.

One rank rounds as many do: its own rows and gradients take the same form. Each form trains with the same seeds.
"""

import statistics
from collections.abc import Iterator

import torch

from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.requirements import source_file
from nestpipe.distributed import World
from nestpipe.embedding.exchange.rounding import ROUNDING
from nestpipe.evaluation.evaluate import evaluate
from nestpipe.evaluation.ranking_metrics import RankMetrics
from nestpipe.recipe.build import build
from nestpipe.recipe.config import Config
from nestpipe.recipe.text import load_config

SEEDS = (0, 1, 2)
QUICK = ("train.steps=3", "evaluate.num_samples=100", "evaluate.batch_size=50")
HR_AT = 10


def quality(quick: bool) -> Iterator[Record]:
    """Yields a record for each form: the hit rate of each seed, and how far their mean is from that of float32."""
    plain: list[float] = []
    for name in (None, *(name for name in ROUNDING if name != "float32")):
        hit_rates = []
        for seed in SEEDS:
            form = () if name is None else (f'exchange.row_dtype="{name}"', f'exchange.gradient_dtype="{name}"')
            settings = (*(QUICK if quick else ()), f"train.seed={seed}", "runtime.dense_threads=1", *form)
            config = load_config(source_file("recipes/hstu-histories.toml"), settings).resolved(1, 1)
            hit_rates.append(_hit_rate(config))
        plain = plain or hit_rates
        differences = [mine - other for mine, other in zip(hit_rates, plain, strict=True)]
        yield {
            "part": "quality",
            "model": config.model.kind,
            "row_dtype": name or "float32",
            "gradient_dtype": name or "float32",
            "steps": config.train.steps,
            "num_held_out": config.evaluate.num_samples,
            "ranks": 1,
            "threads": 1,
            "data_seed": config.data.seed,
            **{f"hr_10_seed_{seed}": rate for seed, rate in zip(SEEDS, hit_rates, strict=True)},
            "hr_10": statistics.mean(hit_rates),
            "hr_10_minus_float32": statistics.mean(differences),
            "hr_10_distance": abs(statistics.mean(differences)),
            "hr_10_largest_distance": max(map(abs, differences)),
        }


def _hit_rate(config: Config) -> float:
    """Trains by a config, and returns the hit rate at 10 of the held-out users."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(config.train.deterministic)
    this_run = build(config, World())
    assert this_run.held_out is not None
    this_run.trainer.fit(this_run.batches, config.train.steps)
    metrics = RankMetrics(this_run.trainer, config.histories.num_items, (HR_AT,))
    return evaluate(this_run.trainer, this_run.held_out, [metrics]).metrics["hr_at_10"]
