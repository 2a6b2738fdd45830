"""`bench monitor`: runs in which a rank, its disk, link or keys are made slow, and what `nestpipe monitor` names.

This module makes three hosts, a rank on each, and injects the faults. The ranks run monitor/rank.py.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.hosts import check_machine, linked_hosts, ranks_on
from nestpipe.bench.harness.report import Record
from nestpipe.bench.monitor.faults import BURST_BYTES, KINDS, RATE, injected
from nestpipe.bench.monitor.rank import GO
from nestpipe.bench.network.run import lines_of
from nestpipe.diagnosis.findings import Finding, find
from nestpipe.diagnosis.run_file import read_measurements

NUM_RANKS = 3
NUM_STEPS = 40
RECIPE = """
[data]
kind = "nestpipe.bench.monitor.workload:Items"
seed = {seed}

[model]
kind = "nestpipe.bench.monitor.workload:PacedDLRM"
dim = 64

[train]
steps = {steps}
batch_size = 512
seed = {seed}

[pipeline]
check_split = false

[store]
num_threads = 1

[runtime]
dense_threads = 1
device = "cpu"

[evaluate]
num_samples = 0
"""


def records(
    quick: bool,
    *,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Trials of each fault, each with another seed.")] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, help="First seed.")] = 1,
    kind: Annotated[str | None, typer.Option("--kind", help="Only this fault.")] = None,
) -> Iterator[Record]:
    check_machine(RATE)
    if kind not in (None, *KINDS):
        raise ValueError(f"kind is {kind!r}; there are {', '.join(KINDS)}")
    seeds = range(seed, seed + (1 if quick else trials))
    return _records(seeds, KINDS if kind is None else (kind,))


BENCHMARK = Benchmark("monitor", records, "Whether `nestpipe monitor` names what was made slow. Needs root.")


def _records(seeds: Sequence[int], kinds: Sequence[str]) -> Iterator[Record]:
    made: list[Record] = []
    for seed in seeds:
        for record in _trials(seed, kinds):
            made.append(record)
            yield record
    for kind in kinds:
        right = [bool(record["is_right"]) for record in made if record["fault"] == kind]
        yield {"fault": kind, "ranks": NUM_RANKS, "num_trials": len(right), "right_share": sum(right) / len(right)}


def _trials(seed: int, kinds: Sequence[str]) -> Iterator[Record]:
    """Yields a record for each kind of fault. The same ranks train one run after the other."""
    victim = seed % NUM_RANKS
    with (
        tempfile.TemporaryDirectory() as name,
        linked_hosts(RATE, BURST_BYTES, NUM_RANKS) as hosts,
    ):
        folder = Path(name)
        (folder / "recipe.toml").write_text(RECIPE.format(seed=seed, steps=NUM_STEPS))
        arguments = [f"--recipe={folder / 'recipe.toml'}", f"--folder={folder}", f"--victim={victim}"]
        with ranks_on(hosts, "nestpipe.bench.monitor.rank", [*arguments, "--kinds", *kinds]) as ranks:
            lines = (json.loads(line) for line in lines_of(ranks))
            for ready in lines:
                kind = ready["ready"]
                with injected(kind, victim, hosts, ranks):
                    (folder / f"{GO}-{kind}").touch()
                    done = next(lines)
                yield _record(kind, victim, seed, done, find(read_measurements(folder / kind)))


def _record(kind: str, victim: int, seed: int, done: dict[str, float], found: Sequence[Finding]) -> Record:
    return {
        "fault": kind,
        "seed": seed,
        "ranks": NUM_RANKS,
        "victim": victim,
        "is_right": is_right(kind, victim, found),
        "named": "; ".join(finding.text for finding in found) or "nothing",
        "num_named": len(found),
        "step_ms": done["step_ms"],
        "stamps_share": done["stamps_share"],
    }


def is_right(kind: str, victim: int, found: Sequence[Finding]) -> bool:
    """Returns whether the fault was named, and nothing else."""
    expected = [] if kind == "healthy" else [(kind, (victim,))]
    return [(finding.kind, finding.ranks) for finding in found] == expected
