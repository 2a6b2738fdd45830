"""`bench learning`: HSTU and FuXi learn synthetic histories, and are compared with counting and with the oracle.

Each trains by its recipe, in this process, then ranks the targets of held-out users among all items outside the user's
history. The oracle, bigram counts and popularity rank the same targets. The counts come from the samples that the model
was trained on. docs/learning.md describes what each of them knows.

The loss of the last batch is computed twice from the same rows: by evaluate just before it is trained on, and by fit.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.requirements import source_file
from nestpipe.data.synthetic.histories import HistoryData
from nestpipe.data.synthetic.history_baselines import Guess, count, ranks_of_targets
from nestpipe.data.synthetic.history_oracle import HistoryOracle
from nestpipe.distributed import World
from nestpipe.evaluation.evaluate import evaluate
from nestpipe.evaluation.ranking_metrics import RankMetrics, hit_rate, mrr, ndcg
from nestpipe.recipe.build import Run, build
from nestpipe.recipe.config import Config
from nestpipe.recipe.sources.synthetic import HELD_OUT, SyntheticHistories
from nestpipe.recipe.text import load_config

CORES = 2
AT = (10, 50)
USERS_AT_A_TIME = 500
QUICK = ("train.steps=12", "evaluate.num_samples=200", "evaluate.batch_size=100")


def records(quick: bool) -> Iterator[Record]:
    for model in ("hstu", "fuxi"):
        recipe = source_file(f"recipes/{model}-histories.toml")
        config = load_config(recipe, QUICK if quick else ()).resolved(1, CORES)
        yield learn(config)


BENCHMARK = Benchmark(
    "learning",
    records,
    "HSTU and FuXi on synthetic histories: ranking metrics against those of counting and the oracle.",
)


def learn(config: Config) -> Record:
    """Trains by the config, and compares the model's metrics with those of the baselines."""
    assert config.runtime.dense_threads is not None
    torch.set_num_threads(config.runtime.dense_threads)
    torch.use_deterministic_algorithms(config.train.deterministic)
    this_run = build(config, World())
    assert this_run.held_out is not None
    seconds, difference = _train(config, this_run)
    metrics = RankMetrics(this_run.trainer, config.histories.num_items, AT)
    values = evaluate(this_run.trainer, this_run.held_out, [metrics]).metrics
    mine = {name.replace("_at_", "_"): value for name, value in values.items() if "num_" not in name}
    others = _baselines(config)
    return {
        "model": config.model.kind,
        "seed": config.train.seed,
        "data_seed": config.data.seed,
        "schedule": config.pipeline.schedule,
        "num_micro_batches": config.pipeline.num_micro_batches,
        "ranks": 1,
        "threads": config.runtime.dense_threads,
        "dim": config.model.dim,
        "num_items": config.histories.num_items,
        "num_held_out": config.evaluate.num_samples,
        "steps": this_run.trainer.num_steps,
        "seconds": seconds,
        **mine,
        **others,
        **{f"hr10_vs_{name}": mine["hr_10"] / others[f"{name}_hr_10"] for name in ("popularity", "bigram", "oracle")},
        "loss_difference": difference,
    }


def _train(config: Config, this_run: Run) -> tuple[float, float]:
    """Returns the seconds of training, and the relative difference of the last batch's two losses."""
    trainer, steps, size = this_run.trainer, config.train.steps, config.train.batch_size
    started = time.perf_counter()
    trainer.fit(this_run.batches, steps - 1)
    seconds = time.perf_counter() - started
    evaluated = evaluate(trainer, [this_run.batches.dataset.samples((steps - 1) * size, size)]).loss
    started = time.perf_counter()
    trained = trainer.fit(this_run.batches, 1).losses[-1]
    return seconds + time.perf_counter() - started, abs(trained - evaluated) / abs(trained)


def _baselines(config: Config) -> dict[str, float]:
    """Returns the metrics of the oracle and of counting for the same held-out users."""
    data = SyntheticHistories(config).histories(None)
    popularity, bigram = count(data, data.shape.num_items, 0, config.train.steps * config.train.batch_size)
    guesses: dict[str, Guess] = {"oracle": HistoryOracle(data), "bigram": bigram, "popularity": popularity}
    ranks = _ranks(guesses, data, config.evaluate.num_samples)
    return {f"{name}_{field}": value for name in guesses for field, value in _metrics(ranks[name]).items()}


def _ranks(guesses: dict[str, Guess], data: HistoryData, num_users: int) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {name: [] for name in guesses}
    for first in range(0, num_users, USERS_AT_A_TIME):
        batch = data.samples(HELD_OUT + first, min(USERS_AT_A_TIME, num_users - first))
        for name, guess in guesses.items():
            parts[name].append(ranks_of_targets(guess.scores(batch), batch))
    return {name: torch.cat(ranks) for name, ranks in parts.items()}


def _metrics(ranks: Tensor) -> dict[str, float]:
    named = {f"hr_{at}": hit_rate(ranks, at) for at in AT} | {f"ndcg_{at}": ndcg(ranks, at) for at in AT}
    return named | {"mrr": mrr(ranks)}
