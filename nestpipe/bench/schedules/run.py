"""`bench schedules`: what a schedule hides, and what it costs, against serial, with one rank and rows in host memory.

Every loop trains the same model on the same batches with its own store. They take turns in one process. The first steps
of a turn do not count, because lanes of the previous loop may still be busy, and the loop's own lanes have run ahead.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.pairs import alternate, median_interval, spread
from nestpipe.bench.harness.report import Record
from nestpipe.bench.schedules.small import small_batch_records
from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed import World
from nestpipe.embedding.optim import Adagrad
from nestpipe.embedding.table import Feature, Pooled, Table, make_store
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.step_times import StepTimes
from nestpipe.pipelining.trace import Span, Trace
from nestpipe.recipe.summary import STEP_FIELDS, step_value
from nestpipe.train.reducer import DenseReducer

SEED = 1
DIM = 64
PIPELINED = ("inter", "nested")
"""Schedules that are compared with serial. With one rank there is no exchange, so intra would equal serial."""
NUM_BATCHES = 12


@dataclass(frozen=True)
class Size:
    """Sizes for which serial spends a quarter to two fifths of a step on the host store."""

    num_rows: int = 2_000_000
    num_samples: int = 2048
    keys_a_sample: int = 96
    hidden: int = 576
    overlap: float = 0.25
    num_rounds: int = 25
    left_out: int = 3
    """Steps at the beginning of each turn that do not count."""
    counted: int = 4

    @property
    def num_keys(self) -> int:
        return self.num_samples * self.keys_a_sample


QUICK = Size(num_rows=20_000, num_samples=128, keys_a_sample=16, hidden=64, num_rounds=3)
OVERHEAD = Size(num_rows=20_000, keys_a_sample=2, hidden=768, num_rounds=40)
"""A tenth of a second of dense compute, as in the demo, and too few rows for hiding their lookup to save time."""
QUICK_OVERHEAD = replace(QUICK, keys_a_sample=2)


def records(quick: bool) -> Iterator[Record]:
    size = QUICK if quick else Size()
    yield from _compare(size)
    yield _overhead(QUICK_OVERHEAD if quick else OVERHEAD)
    for overlap in (0.0, 0.6, 1.0):
        yield _host_traffic(overlap)
    yield _host_traffic(0.6, has_room=True)
    yield from small_batch_records(quick)


BENCHMARK = Benchmark(
    "schedules",
    records,
    "What each schedule hides against serial, on one rank; host traffic by overlap; overhead with small batches.",
)


class Tower(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.layers = nn.Sequential(nn.Linear(DIM, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, 1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05, generator=generator)

    def forward(self, pooled: Tensor, label: Tensor) -> Tensor:
        logit = self.out(self.layers(pooled)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logit, label, reduction="sum")


class Loop:
    """Trains with one schedule, turn by turn."""

    def __init__(
        self,
        schedule: str,
        threads: int,
        size: Size,
        batches: list[Batch],
        spans: list[Span] | None,
        resident_bytes: int | str = "minimum",
    ) -> None:
        self.threads = threads
        table = Table("item", DIM, optimizer=Adagrad(0.01))
        features: dict[str, Feature] = {"items": Pooled(table)}
        store = make_store([table], SEED, threads)
        for keys in torch.arange(size.num_rows).split(1 << 18):  # creates all rows, as long training would
            store.scatter(table.name, keys, store.gather(table.name, keys).records, step=0)
        self.model = Tower(size.hidden)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.reducer = DenseReducer(self.model, World())
        self.trace = Trace([], spans)  # a list keeps all steps, a StepLog only the last ones
        self.pipeline = Pipeline(
            features,
            itertools.cycle(batches),
            store=store,
            schedule=schedule,
            seed=SEED,
            num_threads=threads,
            trace=self.trace,
            resident_bytes=resident_bytes,
        )
        self._steps = iter(self.pipeline)

    def turn(self, num_steps: int) -> list[StepTimes]:
        """Trains, and returns the times of the steps."""
        torch.set_num_threads(self.threads)
        time.sleep(0.1)  # lets lanes of the other loops finish
        first = len(self.trace.steps)
        for _ in range(num_steps + 1):  # the times of a step are complete when the next one begins
            self._step()
        return self.trace.steps[first:]

    def _step(self) -> None:
        step = next(self._steps)
        for micro_batch in step:
            pooled = micro_batch.embeddings["items"]
            assert isinstance(pooled, Tensor)
            (self.model(pooled, micro_batch.inputs["label"]) / step.weight).backward()
        self.reducer.finish(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        step.update_rows()

    def close(self) -> None:
        self.pipeline.__exit__(None, None, None)


def _compare(size: Size) -> Iterator[Record]:
    batches = make_batches(size.overlap, NUM_BATCHES, size)
    spans: list[Span] = []
    loops = {("serial", 1): Loop("serial", 1, size, batches, None)}
    loops |= {(name, 1): Loop(name, 1, size, batches, spans if name == "nested" else None) for name in PIPELINED}
    loops[("serial", 2)] = Loop("serial", 2, size, batches, None)
    turns = {which: partial(_mean_fields, loop, size) for which, loop in loops.items()}
    rounds = alternate(turns, size.num_rounds)
    num_steps = len(loops[("nested", 1)].trace.steps)
    for loop in loops.values():
        loop.close()
    for which in loops:
        record = _record(which, rounds[which], rounds[("serial", 1)], size)
        if which[0] == "nested":
            cost = len(spans) / num_steps * _milliseconds_of_a_span() / float(record["step_ms"])
            record |= {"spans_per_step": len(spans) / num_steps, "trace_cost_fraction": cost}
        yield record


def _mean_fields(loop: Loop, size: Size) -> dict[str, float]:
    """Trains for a turn, and returns the means over its counted steps."""
    times = loop.turn(size.left_out + size.counted)[-size.counted :]
    return {name: statistics.mean(step_value(t, name) for t in times) for name in STEP_FIELDS}


def _overhead(size: Size) -> Record:
    """Measures what nested costs where it can gain nothing, with one rank and one micro-batch: threads, hand-overs."""
    batches = make_batches(size.overlap, NUM_BATCHES, size)
    loops = {schedule: Loop(schedule, 1, size, batches, None) for schedule in ("serial", "nested")}
    turns = {schedule: partial(_mean_fields, loop, size) for schedule, loop in loops.items()}
    rounds = alternate(turns, size.num_rounds)
    step_ms = {schedule: [fields["step_ms"] for fields in rounds[schedule]] for schedule in loops}
    for loop in loops.values():
        loop.close()
    ratios = [n / s for n, s in zip(step_ms["nested"], step_ms["serial"], strict=True)]
    low, high = median_interval(ratios)
    return {
        "schedule": "nested",
        "threads": 1,
        "ranks": 1,
        "num_micro_batches": 1,
        "dim": DIM,
        "num_keys": size.num_keys,
        "num_rounds": size.num_rounds,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": SEED,
        "serial_step_ms": statistics.median(step_ms["serial"]),
        "nested_step_ms": statistics.median(step_ms["nested"]),
        "overhead_vs_serial": statistics.median(ratios),
        "overhead_vs_serial_95_low": low,
        "overhead_vs_serial_95_high": high,
    }


def _record(
    which: tuple[str, int], rounds: list[dict[str, float]], serial: list[dict[str, float]], size: Size
) -> dict[str, int | float | str | bool]:
    schedule, threads = which
    pairs = list(zip(rounds, serial, strict=True))
    record: dict[str, int | float | str | bool] = {
        "schedule": schedule,
        "threads": threads,
        "ranks": 1,
        "num_micro_batches": 1,
        "dim": DIM,
        "num_keys": size.num_keys,
        "overlap": size.overlap,
        "num_rounds": len(rounds),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": SEED,
        **{name: statistics.median(r[name] for r in rounds) for name in STEP_FIELDS},
        **spread("speedup_vs_serial", [s["step_ms"] / r["step_ms"] for r, s in pairs]),
    }
    if which == ("serial", 1):
        record |= spread("lookup_share", [s["exposed_lookup_ms"] / s["step_ms"] for s in serial])
    if schedule in PIPELINED:
        record |= spread(
            "lookup_hidden_fraction", [1 - r["exposed_lookup_ms"] / s["exposed_lookup_ms"] for r, s in pairs]
        )
        saved = [(s["step_ms"] - r["step_ms"]) / s["exposed_lookup_ms"] for r, s in pairs]
        record |= spread("lookup_hidden_end_to_end", saved)
        record |= spread("dense_slowdown", [r["dense_ms"] / s["dense_ms"] for r, s in pairs])
    return record


def make_batches(overlap: float, num_batches: int, size: Size) -> list[Batch]:
    """Makes batches of distinct keys that share a given part of their keys with the previous batch.

    If they are repeated, the first batch shares keys with the last one by chance only, unless the overlap is 0 or 1.
    """
    generator = torch.Generator().manual_seed(SEED)
    num_kept = round(size.num_keys * overlap)
    batches, before = [], torch.empty(0, dtype=torch.int64)
    for _ in range(num_batches):
        kept = before[torch.randperm(len(before), generator=generator)[:num_kept]]
        fresh = torch.randperm(size.num_rows, generator=generator)
        fresh = fresh[~torch.isin(fresh, before)][: size.num_keys - len(kept)]
        keys = torch.cat([kept, fresh])
        before = keys = keys[torch.randperm(len(keys), generator=generator)]
        offsets = torch.arange(0, size.num_keys + 1, size.keys_a_sample)
        label = torch.randint(2, (size.num_samples,), generator=generator).float()
        batches.append(Batch({"items": Jagged(keys, offsets)}, {"label": label}))
    return batches


def _host_traffic(overlap: float, has_room: bool = False) -> Record:
    """Compares bytes, not times. The first steps do not count.

    has_room: the pool has room for all rows, and the steps of the first pass over the batches do not count either.
    """
    small = Size(num_rows=60_000, num_samples=128, keys_a_sample=64, hidden=8)
    num_batches, first = 20, 20 if has_room else 5
    totals = {}
    for schedule in ("serial", "inter"):
        resident_bytes = small.num_rows * 2 * DIM * 4 if has_room else "minimum"
        loop = Loop(schedule, 1, small, make_batches(overlap, num_batches, small), None, resident_bytes)
        loop.turn(first + 13)
        steps = loop.trace.steps[first : first + 13]
        fields = ("retrieved_bytes_per_step", "written_back_bytes_per_step")
        totals[schedule] = sum(step.sizes[field] for step in steps for field in fields)
        loop.close()
    return {
        "schedule": "inter",
        "ranks": 1,
        "num_micro_batches": 1,
        "overlap": overlap,
        "capacity": "everything" if has_room else "minimum",
        "seed": SEED,
        "host_traffic_vs_serial": totals["inter"] / totals["serial"],
    }


def _milliseconds_of_a_span(repeats: int = 20_000) -> float:
    trace = Trace(spans=[])
    started = time.perf_counter()
    for _ in range(repeats):
        with trace.span("dense"):
            pass
    return (time.perf_counter() - started) / repeats * 1e3
