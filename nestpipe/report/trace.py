"""Reads a trace file: the spans of one rank, and the times of its steps."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

IN_FOLDER = "trace.json"
"""Name of the trace in a run's folder, after which the run is called then."""
COMPUTE = "compute"
"""Lane of the thread that trains. Its first span of a batch begins the batch's step."""


@dataclass(frozen=True)
class Span:
    lane: str
    stage: str
    batch: int
    micro_batch: int
    begin: float
    """In milliseconds since the beginning of the trace."""
    end: float


@dataclass(frozen=True)
class RankTrace:
    name: str
    spans: Sequence[Span]

    @property
    def lanes(self) -> list[str]:
        """Returns the lanes in the order of the file, which is that of the path of a batch."""
        return list(dict.fromkeys(span.lane for span in self.spans))

    def step_starts(self) -> list[float]:
        """Returns when each step began."""
        first: dict[int, float] = {}
        for span in self.spans:
            if span.lane == COMPUTE:
                first[span.batch] = min(first.get(span.batch, span.begin), span.begin)
        return [first[batch] for batch in sorted(first)]

    def typical_steps(self, num_steps: int) -> tuple[float, float]:
        """Returns begin and end of consecutive steps that take about as long as most do."""
        starts = self.step_starts()
        windows = [(starts[i], starts[i + num_steps]) for i in range(len(starts) - num_steps)]
        if not windows:
            raise ValueError(f"{self.name} has {len(starts)} steps; to draw {num_steps}, it must have more")
        usual = median(end - begin for begin, end in windows)
        return min(windows, key=lambda window: abs(window[1] - window[0] - usual))


def read_trace(path: Path, rank: int = 0) -> RankTrace:
    """Reads the file that `nestpipe train --trace` has written, or that of a run's folder (logging.dir)."""
    path = path / IN_FOLDER if path.is_dir() else path
    try:
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        first = min((event["ts"] for event in spans), default=0.0)
        found = [_span(event, first) for event in spans]
        order = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace that `nestpipe train --trace` has written: {error!r}") from None
    if not found:
        raise ValueError(f"{path} has no spans of rank {rank}")
    name = path.resolve().parent.name if path.name == IN_FOLDER else path.stem
    return RankTrace(name, sorted(found, key=lambda span: (order.index(span.lane), span.begin)))


def _span(event: dict[str, Any], first: float) -> Span:
    begin = (event["ts"] - first) / 1e3
    place = event["args"]
    return Span(event["cat"], event["name"], place["batch"], place["micro_batch"], begin, begin + event["dur"] / 1e3)
