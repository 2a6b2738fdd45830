"""Part compiled of `bench h200`: what torch.compile gives models that are launched kernel by kernel otherwise."""

import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from nestpipe.bench.h200.models.baselines import DenseStep
from nestpipe.bench.h200.models.measure import (
    NUM_BATCHES,
    NUM_THREADS,
    QUICK,
    Length,
    fill,
    make_resident,
    make_trainer,
    train_stretch,
)
from nestpipe.bench.h200.models.networks import workloads
from nestpipe.bench.h200.models.workload import Workload
from nestpipe.bench.h200.one_rank import device_step_ms
from nestpipe.bench.harness.pairs import spread
from nestpipe.bench.harness.report import Record
from nestpipe.distributed import World

MODELS = ("dlrm", "multi-hot-sgd", "transformer")
Rounds = dict[str, list[dict[str, float]]]


def records(world: World, quick: bool) -> Iterator[Record]:
    for workload in workloads():
        if workload.name in MODELS:
            length = QUICK if quick else Length()
            yield from _compare(world, workload.small if quick else workload, length)
            gc.collect()  # the next model needs the memory


def _compare(world: World, workload: Workload, length: Length) -> Iterator[Record]:
    """Yields a record for the model as it is and one for the compiled model. Both train in turns."""
    torch.compiler.reset()
    batches = workload.batches(NUM_BATCHES)
    forms = {name: replace(workload, compiled=name == "compiled") for name in ("plain", "compiled")}
    trainers = {name: make_trainer(world, form, "nested") for name, form in forms.items()}
    dense = {name: DenseStep(form, batches[0], world.device) for name, form in forms.items()}
    torch.set_num_threads(NUM_THREADS)
    for trainer in trainers.values():
        fill(trainer.store, trainer.tables, workload.num_rows)
    torch.set_num_threads(1)
    seconds = {}
    for name, trainer in trainers.items():
        began = time.perf_counter()
        trainer.fit(batches[:1])
        seconds[name] = time.perf_counter() - began
        make_resident(trainer, workload)
    steps: Rounds = {name: [] for name in forms}
    alone: Rounds = {name: [] for name in forms}
    for number in range(length.num_rounds + 1):  # the first round warms up
        for name, trainer in trainers.items():
            stretch = list(itertools.islice(itertools.cycle(batches), length.steps))
            fields = train_stretch(trainer, stretch, length.left_out)
            times = device_step_ms(dense[name], length.steps, world.device)[length.left_out :]
            if number > 0:
                steps[name].append(fields)
                alone[name].append({"step_ms": statistics.mean(times)})
    identity: Record = {"schedule": "nested", "model": workload.name, "ranks": 1, "num_micro_batches": 1}
    for name in forms:
        figures = {field: statistics.median(r[field] for r in steps[name]) for field in ("step_ms", "dense_ms")}
        figures["dense_unsplit_ms"] = statistics.median(r["step_ms"] for r in alone[name])
        pairs = zip(steps[name], steps["plain"], alone["plain"], strict=True)
        ratios = [(mine["step_ms"] / plain["step_ms"], mine["step_ms"] / d["step_ms"]) for mine, plain, d in pairs]
        figures |= spread("step_vs_plain", [ratio for ratio, _ in ratios])
        figures |= spread("step_over_dense_unsplit", [ratio for _, ratio in ratios])  # of the model as it is
        yield {**identity, "form": name, "first_step_seconds": seconds[name], **figures}
