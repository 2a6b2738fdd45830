"""The spans of all ranks in one file, for chrome://tracing or ui.perfetto.dev."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestpipe.distributed import World
from nestpipe.pipelining.trace import Span

LANES = ("compute", "input", "upload", "route", "host", "rows", "gradients")


def write_trace(spans: Sequence[Span], world: World, path: Path) -> None:
    """All ranks call it; rank 0 writes. A process for each rank, a track for each lane, spans named by stage."""
    texts = world.control.share_text(json.dumps(_events(spans, world.rank)))
    if world.rank == 0:
        events = [event for text in texts for event in json.loads(text)]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(spans: Sequence[Span], rank: int) -> list[dict[str, Any]]:
    lanes = sorted({span.lane for span in spans}, key=LANES.index)
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    for track, lane in enumerate(lanes):
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": lane}})
    offset = time.time_ns() - time.perf_counter_ns()  # clocks of several hosts agree in wall time only
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.stage,
                "cat": span.lane,
                "pid": rank,
                "tid": lanes.index(span.lane),
                "ts": (span.begin_ns + offset) / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
                "args": {"batch": span.batch, "micro_batch": span.micro_batch},
            }
        )
    return events
