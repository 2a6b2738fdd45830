"""`bench overlap`: what a frozen window leaves exposed if every exchange takes the same, known time.

On two ranks, each row exchange and gradient return takes a time T, empty or not. The dense part of a micro-batch sleeps
for more than twice that. Then only the first and the last exchange are exposed: 2 T per step, for any number of
micro-batches.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.pairs import spread
from nestpipe.bench.harness.ranks import records_of_ranks
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed import Channel, World
from nestpipe.embedding.optim import SGD
from nestpipe.embedding.table import Feature, Pooled, Table
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import WINDOWED
from nestpipe.pipelining.step import Step
from nestpipe.pipelining.trace import Trace
from nestpipe.recipe.summary import step_value
from nestpipe.train.reducer import DenseReducer

SEED = 1
NUM_RANKS = 2
EXCHANGE_MS = 20.0
DENSE_MS = 55.0
"""Dense time of each micro-batch: at least 2.5 exchanges."""
NUM_SAMPLES = 64


@dataclass(frozen=True)
class Size:
    nums_micro_batches: tuple[int, ...] = (2, 4, 8)
    left_out: int = 3
    counted: int = 15


QUICK = Size(nums_micro_batches=(2,), left_out=1, counted=2)


def records(quick: bool) -> Iterator[Record]:
    yield from records_of_ranks(NUM_RANKS, _on_rank, QUICK if quick else Size())


BENCHMARK = Benchmark(
    "overlap", records, "What a frozen window leaves exposed of exchanges of known time, with 2 ranks on this machine."
)


class SlowChannel(Channel):
    """A channel on which every exchange takes EXCHANGE_MS."""

    def all_to_all(self, *arguments: Any) -> None:
        end = time.perf_counter() + EXCHANGE_MS / 1e3
        super().all_to_all(*arguments)
        time.sleep(max(0.0, end - time.perf_counter()))


def _on_rank(world: World, size: Size) -> Iterator[Record]:
    torch.set_num_threads(1)
    world.rows = SlowChannel("row exchange", world.watch, world.rows.transport)
    world.gradients = SlowChannel("gradient return", world.watch, world.gradients.transport)
    for num_micro_batches in size.nums_micro_batches:
        for schedule in WINDOWED:
            yield _measure(world, schedule, num_micro_batches, size)


def _measure(world: World, schedule: str, num_micro_batches: int, size: Size) -> Record:
    features: dict[str, Feature] = {"items": Pooled(Table("item", 16, optimizer=SGD(0.1)))}
    model = torch.nn.Linear(4, 1)
    reducer = DenseReducer(model, world)
    trace = Trace()
    num_steps = size.left_out + size.counted
    batches = itertools.islice(itertools.cycle(_batches(world)), num_steps)
    with Pipeline(
        features,
        batches,
        world=world,
        schedule=schedule,
        num_micro_batches=num_micro_batches,
        trace=trace,
        seed=SEED,
    ) as steps:
        for step in steps:
            _train(step, reducer)
    exposed = [step_value(times, "exposed_exchange_ms") for times in trace.steps[size.left_out :]]
    totals = torch.tensor(exposed, dtype=torch.float64)
    world.control.all_reduce_sum(totals)
    exposed_ms = [float(total) / world.size for total in totals]
    return {
        "schedule": schedule,
        "num_micro_batches": num_micro_batches,
        "ranks": NUM_RANKS,
        "threads": 1,
        "seed": SEED,
        "exchange_ms": EXCHANGE_MS,
        "dense_ms_of_micro_batch": DENSE_MS,
        "num_steps": len(exposed_ms),
        "exposed_exchange_ms": statistics.median(exposed_ms),
        **spread("exposed_over_two_exchanges", [ms / (2 * EXCHANGE_MS) for ms in exposed_ms]),
    }


def _batches(world: World) -> list[Batch]:
    """Makes two batches. One has so few keys that most of its micro-batches have empty exchanges."""
    generator = torch.Generator().manual_seed(SEED + world.rank)
    offsets = torch.arange(0, NUM_SAMPLES * 4 + 1, 4)
    keys = [torch.randint(high, (NUM_SAMPLES * 4,), generator=generator) for high in (1000, 4)]
    return [Batch({"items": Jagged(values, offsets)}) for values in keys]


def _train(step: Step, reducer: DenseReducer) -> None:
    for micro_batch in step:
        time.sleep(DENSE_MS / 1e3)
        for rows in micro_batch.rows:
            rows.grad = torch.ones_like(rows)
    reducer.finish(step)
    step.update_rows()
