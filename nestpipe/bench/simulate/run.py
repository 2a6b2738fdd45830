"""`bench simulate`: how far the simulator's predictions are from steps that were measured, and from published ones.

This module makes two hosts and starts the ranks. The ranks run simulate/rank.py, which writes traces of serial runs.
Costs that are fitted to these predict the other schedules, whose steps are measured but not used.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.hosts import check_machine, linked_hosts, ranks_on
from nestpipe.bench.harness.report import Record
from nestpipe.bench.harness.requirements import source_file
from nestpipe.bench.network.run import BURST_BYTES, lines_of
from nestpipe.bench.simulate.published import published_records
from nestpipe.bench.simulate.recorded import OVERLAPS, recorded_records
from nestpipe.prediction.ways import CROSSING, way_named
from nestpipe.simulator.fit import Fitted, fit, fit_error, predict
from nestpipe.simulator.overlap import Overlap
from nestpipe.simulator.trace_times import read_trace_times

RATE = "1gbit"


def records(quick: bool) -> Iterator[Record]:
    check_machine(RATE)
    return _records(quick)


BENCHMARK = Benchmark(
    "simulate", records, "How far predictions of `nestpipe simulate` are from measured and published steps. Needs root."
)


def _records(quick: bool) -> Iterator[Record]:
    yield from published_records()
    yield from recorded_records(source_file("benchmarks/results"))
    yield from _network_records(quick)


def _network_records(quick: bool) -> Iterator[Record]:
    measured: list[dict[str, int | float | str | bool]] = []
    with TemporaryDirectory() as folder:
        arguments = [*(["--quick"] if quick else []), f"--traces={folder}"]
        with (
            linked_hosts(RATE, BURST_BYTES) as hosts,
            ranks_on(hosts, "nestpipe.bench.simulate.rank", arguments) as ranks,
        ):
            measured += [json.loads(line) for line in lines_of(ranks)]
        for compute in dict.fromkeys(str(record["compute"]) for record in measured):
            fits = [fit(read_trace_times(path)) for path in sorted(Path(folder).glob(f"{compute}-*.json"))]
            yield from (_compared(r, fits) for r in measured if r["compute"] == compute)


def _compared(record: Record, fits: list[Fitted]) -> Record:
    """Returns the record of a measured way with what is predicted for it. Serial is what costs were fitted to."""
    schedule, num = str(record["schedule"]), int(record["num_micro_batches"])
    overlap, way = None, way_named(schedule)
    if record["cross_batch"]:
        overlap, way = Overlap(*(float(record[name]) for name in OVERLAPS)), CROSSING
    result = predict(fits, way, num, overlap=overlap)
    error = abs(result.step_ms / float(record["step_ms"]) - 1)
    errors: dict[str, float] = {"step_error" if record["compute"] == "paced" else "unlimited_step_error": error}
    if schedule == "serial":
        fitted = next(one for one in fits if one.num_micro_batches == num)
        errors = {"fit_error": abs(fit_error(fitted)), "traced_step_ms": fitted.step_ms}
    shape = ("compute", "schedule", "cross_batch", "num_micro_batches", *(name for name in OVERLAPS if name in record))
    named = (*shape, "ranks", "threads", "dim", "batch_size", "num_rounds", "seed")
    return {
        **{"table": "network", **{name: record[name] for name in named}, "rate": RATE},
        **{"measured_step_ms": record["step_ms"], "predicted_step_ms": result.step_ms, **errors},
        **{f"measured_{name}": record[name] for name in ("exposed_lookup_ms", "exposed_exchange_ms")},
        **{f"predicted_{name}": result.parts[name] for name in ("exposed_lookup_ms", "exposed_exchange_ms")},
    }
