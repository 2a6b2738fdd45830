"""Predictions for the runs on an H200 whose results are on record.

Costs come from the serial run of the same case: from its trace where that is on record, else from its summary. The
times of the other schedules are held out. What a summary does not tell: the stages of a look-up one by one, the share
of them that runs Python, and how ranks that share a device slow each other down.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nestpipe.bench.harness.report import Record
from nestpipe.prediction.ways import CROSSING, way_named
from nestpipe.simulator.fit import Fitted, fit, fit_summary, predict
from nestpipe.simulator.overlap import Overlap
from nestpipe.simulator.trace_times import read_trace_times

FILES = ("h200-one-rank", "h200-models", "h200-four-ranks")
OVERLAPS = ("key_overlap", "head_overlap", "tail_overlap")
"""Fields of runs with exchange across batches: what their batches share."""
CASE = ("num_distinct", "model", "recipe", "window")
"""Fields in which the runs of a file differ, the schedule and the number of micro-batches aside."""
LEAST_DENSE_MS = 20.0
"""Dense part of models for which the error has a limit. Of smaller models most of a step is Python, of which the
threads of a process do one thing at a time; no summary says how much each stage has."""


def recorded_records(results: Path) -> Iterator[Record]:
    """Yields a record for each run that a serial run of the same case predicts."""
    for name in FILES:
        runs = [r for r in json.loads((results / f"{name}.json").read_text())["records"] if _is_run(r)]
        for run in runs:
            serial = _serial_of(run, runs)
            if serial is not None and run["schedule"] != "serial":
                traces = sorted(results.glob(f"traces/h200-{run['recipe']}-serial-*.json")) if "recipe" in run else []
                yield _predicted(name, run, serial, [fit(read_trace_times(path)) for path in traces])


def _is_run(record: Mapping[str, Any]) -> bool:
    return all(name in record for name in ("schedule", "step_ms", "dense_ms", "exposed_lookup_ms"))


def _case(run: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(run.get(name) for name in CASE)


def _serial_of(run: Mapping[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    num = "num_micro_batches"
    like = [r for r in runs if r["schedule"] == "serial" and _case(r) == _case(run) and r.get(num) == run.get(num)]
    return like[0] if like else None


def _predicted(name: str, run: Mapping[str, Any], serial: Mapping[str, Any], fits: list[Fitted]) -> Record:
    """fits: those of the traces of serial runs; without any, the summary of one is taken."""
    num_ranks, num = int(run.get("ranks", 1)), int(run.get("num_micro_batches", 1))
    # No run of serial tells how ranks that share a device slow each other down.
    is_limited = num_ranks == 1 and float(serial["dense_ms"]) >= LEAST_DENSE_MS
    fits = fits or [fit_summary(name, {"num_micro_batches": 1, **serial}, num_ranks)]
    way, overlap = way_named(str(run["schedule"])), None
    if run.get("cross_batch"):
        way, overlap = CROSSING, Overlap(*(float(run[field]) for field in OVERLAPS))
    step_ms = predict(fits, way, num, float(run.get("hit_rate", 0.0)), overlap).step_ms
    error = abs(step_ms / float(run["step_ms"]) - 1)
    crossing = {"cross_batch": run["cross_batch"]} if "cross_batch" in run else {}
    return {
        **{"table": "h200", "file": name, **{field: run[field] for field in CASE if field in run}},
        **{"schedule": run["schedule"], "num_micro_batches": num, "ranks": num_ranks, **crossing},
        **{"serial_step_ms": serial["step_ms"], "measured_step_ms": run["step_ms"], "predicted_step_ms": step_ms},
        ("step_error" if is_limited else "unlimited_step_error"): error,
    }
