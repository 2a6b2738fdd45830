"""The run that faults hit: a small DLRM on synthetic clicks, with many checkpoints."""

from dataclasses import dataclass
from pathlib import Path

NUM_STEPS = 24
EVERY = 3
"""Steps between checkpoints."""

_RECIPE = f"""
[data]
kind = "nestpipe.bench.faults.clicks:FewClicks"

[model]
kind = "nestpipe.bench.faults.clicks:NoisyDLRM"
dim = 8

[[tables]]
name = "c03"
optimizer = "adam"

[[tables]]
name = "c16"
optimizer = "rowwise_adagrad"

[dense_optimizer]
warmup_steps = 10

[train]
steps = {NUM_STEPS}
batch_size = 24

[pipeline]
num_micro_batches = 2
check_split = false

[store]
num_threads = 1

[runtime]
dense_threads = 1
device = "cpu"

[distributed]
timeout_seconds = 20.0

[evaluate]
num_samples = 0

[checkpoint]
every = {EVERY}
keep = 2
complete_every = 3
"""


@dataclass(frozen=True)
class Setting:
    """What a run is, apart from its folder. Runs of the same setting end with the same digest."""

    schedule: str
    num_ranks: int
    resident_bytes: str
    """memory.resident_bytes: how many rows stay in the pool."""

    def __str__(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"{self.schedule}, {ranks}, pool {self.resident_bytes}"


def write_recipe(folder: Path) -> Path:
    recipe = folder / "recipe.toml"
    recipe.write_text(_RECIPE)
    return recipe


def arguments_of(setting: Setting, recipe: Path, checkpoints: Path, summary: Path, *more: str) -> list[str]:
    """Returns the arguments of `nestpipe` for a run. The same ones resume it."""
    values = {
        "pipeline.schedule": setting.schedule,
        "memory.resident_bytes": setting.resident_bytes,
        "checkpoint.dir": str(checkpoints),
    }
    settings = [argument for name, value in values.items() for argument in ("--set", f"{name}={value}")]
    ranks = ["--ranks", str(setting.num_ranks), "--json", str(summary)]
    return ["train", str(recipe), *settings, *ranks, *more]
