"""`bench consistency`: schedules do not change the quality of a model; stale rows do.

Three ranks train the recipe recipes/hstu-consistency.toml, with dropout and four micro-batches, and rank held-out
targets. For one seed, every schedule must end with the same digest and the same metrics, in every digit. For several
seeds, serial is compared with `pipeline.stale`, which shows the model shared rows as they were before the last update.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nestpipe.bench.consistency import figures
from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.ranks import records_of_ranks
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.requirements import source_file
from nestpipe.distributed import World
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.recipe.run import run
from nestpipe.recipe.text import load_config

RECIPE = "recipes/hstu-consistency.toml"
NUM_RANKS = 3
CORES = 2
SEEDS = (1, 2, 3)
METRICS = ("hr_at_10", "hr_at_50", "ndcg_at_10", "ndcg_at_50")
QUICK = ("train.steps=4", "train.batch_size=8", "evaluate.num_samples=60", "evaluate.batch_size=20")


@dataclass(frozen=True)
class Run:
    """A training run that is compared with serial of the same seed."""

    seed: int
    schedule: str
    stale: bool = False

    @property
    def settings(self) -> list[str]:
        return [
            f"train.seed={self.seed}",
            f"data.seed={self.seed}",
            f"pipeline.schedule={self.schedule}",
            f"pipeline.stale={str(self.stale).lower()}",
        ]


def runs(quick: bool) -> list[Run]:
    """Lists every schedule with the first seed, and with every seed serial, and nested with stale rows."""
    first, *others = SEEDS[:1] if quick else SEEDS
    compared = [Run(seed, schedule, schedule == "nested") for seed in others for schedule in ("serial", "nested")]
    return [*(Run(first, schedule) for schedule in SCHEDULES), Run(first, "nested", stale=True), *compared]


def records(quick: bool) -> Iterator[Record]:
    source_file(RECIPE)  # fails here rather than on the ranks
    made: list[Record] = []
    for this_run, record in zip(runs(quick), records_of_ranks(NUM_RANKS, _on_rank, quick), strict=True):
        made.append(record)
        yield {**record, **_compared(made, this_run)}


BENCHMARK = Benchmark(
    "consistency",
    records,
    "HSTU on 3 ranks: every schedule ends with serial's digest and metrics; the differences that stale rows make.",
    plot=figures.plot,
)


def _on_rank(world: World, quick: bool) -> Iterator[Record]:
    for this_run in runs(quick):
        yield _train(world, this_run, quick)


def _train(world: World, this_run: Run, quick: bool) -> Record:
    settings = [*this_run.settings, *(QUICK if quick else ())]
    config = load_config(source_file(RECIPE), settings).resolved(NUM_RANKS, CORES)
    summary = run(config, world)
    return {
        "seed": this_run.seed,
        "schedule": this_run.schedule,
        "stale": this_run.stale,
        "num_micro_batches": config.pipeline.num_micro_batches,
        "ranks": NUM_RANKS,
        "threads": config.runtime.dense_threads or 1,
        "steps": summary["steps"],
        "digest": summary["digest"],
        "final_loss": summary["final_loss"],
        **{name.replace("_at_", "_"): summary["metrics"][name] for name in METRICS},
    }


def _compared(made: list[Record], this_run: Run) -> dict[str, float]:
    """Compares the last record with serial of the same seed: equality in every digit, or differences for stale rows."""
    mine = made[-1]
    serial = next(record for record in made if record["seed"] == this_run.seed and record["schedule"] == "serial")
    names = [name.replace("_at_", "_") for name in METRICS]
    if this_run.stale:
        return {f"{name}_less_serial": float(mine[name]) - float(serial[name]) for name in names}
    return {"equals_serial": int(all(mine[name] == serial[name] for name in (*names, "digest", "final_loss")))}
