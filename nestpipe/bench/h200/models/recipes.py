"""Small models, in which everything is launches and Python, run as `nestpipe train` runs their recipes."""

import statistics
from collections.abc import Iterator

from nestpipe.bench.harness.pairs import spread
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.requirements import source_file
from nestpipe.distributed import World
from nestpipe.recipe.config import Config
from nestpipe.recipe.run import run
from nestpipe.recipe.text import load_config
from nestpipe.store.cores import usable_cores

RECIPES = {"demo": None, "histories": "recipes/hstu-histories.toml"}
"""By model; None for the default recipe."""
STEPS, QUICK_STEPS, NUM_ROUNDS = 120, 12, 5


def compare(world: World, model: str, quick: bool) -> Iterator[Record]:
    """Yields a record for serial and one for nested. Their runs take turns."""
    steps, num_rounds = (QUICK_STEPS, 1) if quick else (STEPS, NUM_ROUNDS)
    schedules = ("serial", "nested")
    summaries: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in schedules}
    digests: dict[str, str] = {}
    for _ in range(num_rounds):
        for schedule in schedules:
            summary = run(_config(world, RECIPES[model], schedule, steps), world)
            digests[schedule] = summary["digest"]
            summaries[schedule].append({name: v for name, v in summary.items() if isinstance(v, int | float)})
    for schedule, mine in summaries.items():
        figures = {name: statistics.median(s[name] for s in mine) for name in _FIELDS}
        figures["unattributed_share"] = figures["unattributed_ms"] / figures["step_ms"]
        if schedule == "nested":
            pairs = zip(mine, summaries["serial"], strict=True)
            figures |= spread("nested_vs_serial", [n["step_ms"] / s["step_ms"] for n, s in pairs])
            figures["digests_equal"] = int(digests["nested"] == digests["serial"])
        yield {"schedule": schedule, "model": model, "ranks": 1, "steps": steps, **figures}


_FIELDS = (
    "step_ms",
    "samples_per_second",
    "dense_ms",
    "row_update_ms",
    "exposed_lookup_ms",
    "exposed_exchange_ms",
    "exposed_input_ms",
    "exposed_reduce_ms",
    "other_ms",
    "unattributed_ms",
    "hit_rate",
)


def _config(world: World, recipe: str | None, schedule: str, steps: int) -> Config:
    settings = [
        f"runtime.device={world.device.type}",
        f"pipeline.schedule={schedule}",
        f"train.steps={steps}",
        "evaluate.num_samples=0",
    ]
    return load_config(None if recipe is None else source_file(recipe), settings).resolved(1, usable_cores())
