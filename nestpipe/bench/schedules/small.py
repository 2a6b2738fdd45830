"""Small batches in `bench schedules`: the demo's model and its 26 tables, inter against serial, on one rank.

A small batch gives a schedule little to hide, so the measurement shows what the schedule costs: lanes, hand-overs
between them, and Python calls from several threads of one interpreter. The batches are made before the measurement.
"""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from nestpipe.bench.harness.pairs import alternate, one_thread, spread
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch
from nestpipe.distributed import World
from nestpipe.recipe.build import build
from nestpipe.recipe.text import change_config, load_config
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer

BATCH_SIZES = (64, 256, 2048)
NUM_BATCHES = 12


@dataclass(frozen=True)
class Turns:
    num_rounds: int = 15
    left_out: int = 5
    """Steps at the beginning of each turn that do not count, because the pipeline fills."""
    counted: int = 15


QUICK = Turns(num_rounds=2, left_out=1, counted=2)


def small_batch_records(quick: bool) -> Iterator[Record]:
    for batch_size in BATCH_SIZES:
        yield _record(batch_size, QUICK if quick else Turns())


def _record(batch_size: int, turns: Turns) -> Record:
    config = load_config(None, [f"train.batch_size={batch_size}", "evaluate.num_samples=0"]).resolved(1, cores=1)
    runs = {name: build(change_config(config, [f"pipeline.schedule={name}"]), World()) for name in ("serial", "inter")}
    trainers = {name: run.trainer for name, run in runs.items()}
    step_ms = _rounds(trainers, list(itertools.islice(runs["serial"].batches, NUM_BATCHES)), turns)
    return {
        "schedule": "inter",
        "threads": 1,
        "ranks": 1,
        "num_micro_batches": config.pipeline.num_micro_batches,
        "dim": config.model.dim,
        "num_tables": len(trainers["inter"].tables),
        "batch_size": batch_size,
        "num_rounds": turns.num_rounds,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": config.train.seed,
        "serial_step_ms": statistics.median(step_ms["serial"]),
        "step_ms": statistics.median(step_ms["inter"]),
        **spread("small_batch_overhead", [i / s for i, s in zip(step_ms["inter"], step_ms["serial"], strict=True)]),
    }


def _rounds(trainers: dict[str, Trainer], batches: list[Batch], turns: Turns) -> dict[str, list[float]]:
    """Returns the mean step time of each turn, by schedule."""
    with one_thread():
        works = {name: partial(_turn, trainer, batches, turns) for name, trainer in trainers.items()}
        return alternate(works, turns.num_rounds)


def _turn(trainer: Trainer, batches: list[Batch], turns: Turns) -> float:
    result = FitResult()
    trainer.fit(itertools.cycle(batches), turns.left_out + turns.counted, result=result)
    return statistics.mean(step.step_ms for step in result.times[turns.left_out :])
