"""`bench consistency`: what a schedule does to the quality of a model. Nothing; and what stale rows do to it.

Three ranks train the recipe recipes/hstu-consistency.toml, with dropout and four micro-batches, and rank held-out
targets. On one seed every schedule must end with the same digest and the same metrics, in every digit. On several seeds
serial stands beside `pipeline.stale`, which shows the model shared rows as they were before the last update.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
class Way:
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


def ways(quick: bool) -> list[Way]:
    """Every schedule on the first seed; on all of them serial, and stale rows in the schedule that could show them."""
    first, *others = SEEDS[:1] if quick else SEEDS
    compared = [Way(seed, schedule, schedule == "nested") for seed in others for schedule in ("serial", "nested")]
    return [*(Way(first, schedule) for schedule in SCHEDULES), Way(first, "nested", stale=True), *compared]


def records(quick: bool) -> Iterator[Record]:
    source_file(RECIPE)  # fails here rather than on the ranks
    made: list[Record] = []
    for way, record in zip(ways(quick), records_of_ranks(NUM_RANKS, _on_rank, quick), strict=True):
        made.append(record)
        yield {**record, **_compared(made, way)}


def _on_rank(world: World, quick: bool) -> Iterator[Record]:
    for way in ways(quick):
        yield _train(world, way, quick)


def _train(world: World, way: Way, quick: bool) -> Record:
    config = load_config(source_file(RECIPE), [*way.settings, *(QUICK if quick else ())]).resolved(NUM_RANKS, CORES)
    summary = run(config, world)
    return {
        "seed": way.seed,
        "schedule": way.schedule,
        "stale": way.stale,
        "num_micro_batches": config.pipeline.num_micro_batches,
        "ranks": NUM_RANKS,
        "threads": config.runtime.dense_threads or 1,
        "steps": summary["steps"],
        "digest": summary["digest"],
        "final_loss": summary["final_loss"],
        **{name.replace("_at_", "_"): summary["metrics"][name] for name in METRICS},
    }


def _compared(made: list[Record], way: Way) -> dict[str, float]:
    """With serial of the same seed: 1 if equal in every digit; or, for stale rows, by how much they differ."""
    mine = made[-1]
    serial = next(record for record in made if record["seed"] == way.seed and record["schedule"] == "serial")
    names = [name.replace("_at_", "_") for name in METRICS]
    if way.stale:
        return {f"{name}_less_serial": float(mine[name]) - float(serial[name]) for name in names}
    return {"equals_serial": int(all(mine[name] == serial[name] for name in (*names, "digest", "final_loss")))}
