"""Reads the times of stages from a trace of a real run."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nestpipe.pipelining.stage import COMPUTE, STAGES
from nestpipe.prediction.ways import CROSSING, way_named
from nestpipe.prediction.work import Times, Way
from nestpipe.report.trace import IN_FOLDER, RankTrace, Span, read_trace

HAS_ISSUER = "has_issuer"
"""Number that a trace says of its run: 1 if one thread issued all exchanges of rows."""

Place = tuple[str, int]
"""Stage and micro-batch; -1 stands for the whole batch."""


@dataclass(frozen=True)
class TraceTimes:
    """Times of the steps of a trace, the first and the last left out: they may not be whole."""

    name: str
    way: Way
    has_issuer: bool
    """One thread issued all exchanges of rows."""
    num_ranks: int
    num_micro_batches: int
    num_steps: int
    step_ms: float
    """Mean over steps, of the slowest rank."""
    stages: Mapping[Place, Times]
    """Milliseconds of each stage: a line for each step, a column for each rank."""
    together_ms: Mapping[Place, Times]
    """Milliseconds of each stage from when the last rank began it until the last one ended it, for each step."""
    rest_ms: Times
    """Time of the compute lane that no span covers, as in `stages`."""
    spread: float
    """Largest step over the smallest, minus 1."""


def read_trace_times(path: Path) -> TraceTimes:
    """Raises ValueError for a file that is no trace, or one with fewer than 4 steps."""
    offsets, has_issuer = _offsets(path)
    ranks = [read_trace(path, rank) for rank in offsets]
    starts = [_starts(rank) for rank in ranks]
    whole = [batch for batch in sorted(starts[0])[1:-1] if all(batch in s and batch + 1 in s for s in starts)]
    if len(whole) < 2:
        raise ValueError(f"{path} has {len(starts[0])} steps; to fit costs, trace at least 4: --trace-steps A:B")
    steps = np.array([[start[batch + 1] - start[batch] for batch in whole] for start in starts])
    spans = [_spans_of_stages(rank, whole, offset) for rank, offset in zip(ranks, offsets.values(), strict=True)]
    places = sorted({(stage, micro_batch) for of_rank in spans for stage, micro_batch, _ in of_rank})
    rest = [_rest(rank, start, whole) for rank, start in zip(ranks, starts, strict=True)]
    slowest = steps.max(0)
    return TraceTimes(
        ranks[0].name,
        _way(ranks[0]),
        has_issuer,
        len(ranks),
        1 + max((micro_batch for stage, micro_batch in places if stage == "dense"), default=0),
        len(whole),
        float(steps.mean(1).max()),
        {place: np.array([[_spent(one, place, batch) for one in spans] for batch in whole]) for place in places},
        {place: np.array([_together(spans, place, batch) for batch in whole]) for place in places},
        np.array(rest).T,
        float(slowest.max() / slowest.min() - 1),
    )


def _offsets(path: Path) -> tuple[dict[int, float], bool]:
    """Returns when the first span of each rank began, in milliseconds, by rank, and whether there was an issuer."""
    path = path / IN_FOLDER if path.is_dir() else path
    offsets: dict[int, float] = {}
    try:
        trace = json.loads(path.read_text())
        has_issuer = bool(trace.get("otherData", {}).get(HAS_ISSUER))
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                rank, begin = int(event["pid"]), float(event["ts"]) / 1e3
                offsets[rank] = min(begin, offsets.get(rank, begin))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace that `nestpipe train --trace` has written: {error!r}") from None
    return dict(sorted(offsets.items())), has_issuer


def _starts(rank: RankTrace) -> dict[int, float]:
    """Returns when each step began, by batch."""
    starts: dict[int, float] = {}
    for span in rank.spans:
        if span.lane == COMPUTE:
            starts[span.batch] = min(starts.get(span.batch, span.begin), span.begin)
    return starts


def _way(rank: RankTrace) -> Way:
    if any(span.stage == "send_early_rows" for span in rank.spans):
        return CROSSING
    lanes = set(rank.lanes)
    overlaps_batches, overlaps_exchanges = bool(lanes & {"host", "route", "input"}), bool(lanes & {"rows", "gradients"})
    names = {(False, False): "serial", (True, False): "inter", (False, True): "intra", (True, True): "nested"}
    return way_named(names[overlaps_batches, overlaps_exchanges])


_SpansOfStages = Mapping[tuple[str, int, int], list[tuple[float, float]]]
"""Begin and end of the spans of a rank, by stage, micro-batch and batch."""


def _spans_of_stages(rank: RankTrace, batches: Sequence[int], offset: float) -> _SpansOfStages:
    """Leaves out spans of the compute lane that are waits: those of stages that have a lane of their own."""
    own_lane = {span.stage for span in rank.spans if span.lane != COMPUTE}
    spans: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for span in rank.spans:
        is_wait = span.lane == COMPUTE and span.stage in own_lane
        if span.batch in batches and span.stage in STAGES and not is_wait:
            place = span.stage, _micro_batch(span), span.batch
            spans[place].append((offset + span.begin, offset + span.end))
    return spans


def _spent(spans: _SpansOfStages, place: Place, batch: int) -> float:
    return sum(end - begin for begin, end in spans.get((*place, batch), ()))


def _together(spans: Sequence[_SpansOfStages], place: Place, batch: int) -> float:
    """Returns the time from the last rank's begin to the last rank's end. It is at least the shortest and at most the
    longest time of a rank, even if the clocks of hosts differ."""
    found = [one[*place, batch] for one in spans if (*place, batch) in one]
    if not found:
        return 0.0
    spent = [_spent(one, place, batch) for one in spans if (*place, batch) in one]
    between = max(times[-1][1] for times in found) - max(times[0][0] for times in found)
    return min(max(between, min(spent)), max(spent))


def _micro_batch(span: Span) -> int:
    """Returns the micro-batch of a stage that is done for each. The dense optimizer is the dense stage of none."""
    return span.micro_batch if span.stage in ("send_rows", "return_gradients", "dense") else -1


def _rest(rank: RankTrace, starts: Mapping[int, float], batches: Sequence[int]) -> list[float]:
    """Returns the time of each step that no span of the compute lane covers."""
    covered: dict[int, float] = defaultdict(float)
    for span in rank.spans:
        if span.lane == COMPUTE:
            covered[span.batch] += span.end - span.begin
    return [max(0.0, starts[batch + 1] - starts[batch] - covered[batch]) for batch in batches]
