"""Writes the spans of all ranks to one file, for chrome://tracing or ui.perfetto.dev."""

import json
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestpipe.distributed import World
from nestpipe.pipelining.trace import Span

LANES = ("compute", "input", "upload", "route", "host", "rows", "gradients")


def parse_steps(text: str) -> range:
    """Returns the steps that A:B names: from A to B - 1, counted from 0 at the beginning of the training."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if len(steps) == 0:
        raise ValueError(f"the steps to trace are {text!r}, must be A:B with A < B; 100:200 are steps 100 to 199")
    return steps


def write_trace(
    spans: Sequence[Span],
    world: World,
    path: Path,
    steps: range | None = None,
    about: Mapping[str, float] | None = None,
) -> None:
    """Writes a process for each rank, a track for each lane and spans named by stage. All ranks call it.

    Rank 0 writes the file. It records `steps`, the steps that were asked for, and numbers `about` the run.
    """
    offset_ns = time.time_ns() - time.perf_counter_ns()  # clocks of several hosts agree in wall time only
    texts = world.control.share_text(json.dumps(events_of(spans, world.rank, offset_ns)))
    if world.rank > 0:
        return
    events = [event for text in texts for event in json.loads(text)]
    if steps is not None and len(spans) == 0:
        warnings.warn(f"the trace is empty: steps {steps.start} to {steps.stop - 1} were not trained", stacklevel=2)
    traced = {} if steps is None else {"first_step": steps.start, "end_step": steps.stop}
    other = {**traced, **(about or {})}
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}))


def events_of(spans: Sequence[Span], rank: int, offset_ns: int) -> list[dict[str, Any]]:
    """Returns the process of a rank. offset_ns: added to the times of the spans."""
    lanes = sorted({span.lane for span in spans}, key=LANES.index)
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    for track, lane in enumerate(lanes):
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": lane}})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.stage,
                "cat": span.lane,
                "pid": rank,
                "tid": lanes.index(span.lane),
                "ts": (span.begin_ns + offset_ns) / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
                "args": {"batch": span.batch, "micro_batch": span.micro_batch},
            }
        )
    return events
