"""Files of small runs, as `nestpipe train` writes them."""

import json
from pathlib import Path
from typing import Any

LANES = ("compute", "host", "rows")


def trace_event(lane: str, stage: str, batch: int, begin: float, end: float, micro_batch: int = -1) -> dict[str, Any]:
    """Returns an event of a trace file, in milliseconds."""
    return {
        **{"ph": "X", "name": stage, "cat": lane, "pid": 0, "tid": LANES.index(lane)},
        **{"ts": 5e9 + 1e3 * begin, "dur": 1e3 * (end - begin)},
        "args": {"batch": batch, "micro_batch": micro_batch},
    }


def write_trace(path: Path, step_ms: float, num_steps: int = 8) -> Path:
    """Writes steps of equal length: two micro-batches of dense work, then rows, on three lanes."""
    names = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": t, "args": {"name": n}} for t, n in enumerate(LANES)]
    events: list[dict[str, Any]] = []
    for batch in range(num_steps):
        start = batch * step_ms
        events += [
            trace_event("compute", "dense", batch, start, start + 0.4 * step_ms, 0),
            trace_event("compute", "dense", batch, start + 0.5 * step_ms, start + 0.9 * step_ms, 1),
            trace_event("host", "retrieve", batch + 1, start + 0.1 * step_ms, start + 0.6 * step_ms),
            trace_event("rows", "send_rows", batch, start + 0.05 * step_ms, start + 0.3 * step_ms, 1),
        ]
    path.write_text(json.dumps({"traceEvents": [*names, *events], "otherData": {}}))
    return path


def summary(schedule: str, step_ms: float, **more: Any) -> dict[str, Any]:
    return {
        **{"schedule": schedule, "ranks": 2, "backend": "gloo", "num_micro_batches": 2, "steps": 8, "final_loss": 0.5},
        **{"step_ms": step_ms, "dense_ms": 0.8 * step_ms, "exposed_lookup_ms": 0.1 * step_ms},
        **{"exposed_exchange_ms": 0.05 * step_ms, "row_update_ms": 0.03 * step_ms, "other_ms": 0.02 * step_ms},
        **{"samples_per_second": 4096e3 / step_ms, "hit_rate": 0.25, "peak_rss_bytes": 5e8},
        **{"exchanged_row_bytes_per_step": 1.5e6, "retrieved_bytes_per_step": 3e6, "written_back_bytes_per_step": 2e6},
        "metrics": {"auc": 0.75, "num_samples": 64},
        "environment": {"nestpipe": "0.2.0", "torch": "2.13.0", "cpu": "Some CPU", "cores": 2, "device": "cpu"},
        "digest": "00ff" * 16,
        "config": f'[pipeline]\nschedule = "{schedule}"\n\n[train]\nsteps = 8\n',
        **more,
    }


def write_run(folder: Path, step_ms: float = 20.0, losses: tuple[float, ...] = (), **more: Any) -> Path:
    """Writes the folder of a run. Its schedule is called like the folder."""
    folder.mkdir(parents=True)
    write_trace(folder / "trace.json", step_ms)
    (folder / "summary.json").write_text(json.dumps(summary(folder.name, step_ms, **more)))
    lines: list[dict[str, Any]] = [
        {"step": i + 1, "loss": loss, "owned_keys_per_step": 100, "retrieved_keys_per_step": 100 - 10 * i}
        for i, loss in enumerate(losses or (1.0, 0.8, 0.7, 0.6, 0.55, 0.52, 0.51, 0.5))
    ]
    lines.insert(4, {"step": 4, "validation/auc": 0.7, "validation/auc_ceiling": 0.9, "validation/num_samples": 64})
    lines.append({"step": 8, "validation/auc": 0.75, "validation/auc_ceiling": 0.9, "validation/num_samples": 64})
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
