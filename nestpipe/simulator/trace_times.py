"""Reads the times of stages from a trace of a real run."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nestpipe.pipelining.stage import COMPUTE, STAGES
from nestpipe.report.trace import IN_FOLDER, RankTrace, Span, read_trace
from nestpipe.simulator.work import Times

Place = tuple[str, int]
"""Stage and micro-batch; -1 stands for the whole batch."""


@dataclass(frozen=True)
class TraceTimes:
    """Times of the steps of a trace, the first and the last left out: they may not be whole."""

    name: str
    schedule: str
    num_ranks: int
    num_micro_batches: int
    num_steps: int
    step_ms: float
    """Mean over steps, of the slowest rank."""
    stages: Mapping[Place, Times]
    """Milliseconds of each stage: a line for each step, a column for each rank."""
    rest_ms: Times
    """Time of the compute lane that no span covers, likewise."""
    spread: float
    """Largest step over the smallest, minus 1."""


def read_trace_times(path: Path) -> TraceTimes:
    """Raises ValueError for a file that is no trace, or one with fewer than 4 steps."""
    ranks = [read_trace(path, rank) for rank in range(_num_ranks(path))]
    starts = [_starts(rank) for rank in ranks]
    whole = [batch for batch in sorted(starts[0])[1:-1] if all(batch in s and batch + 1 in s for s in starts)]
    if len(whole) < 2:
        raise ValueError(f"{path} has {len(starts[0])} steps; to fit costs, trace at least 4: --trace-steps A:B")
    steps = np.array([[start[batch + 1] - start[batch] for batch in whole] for start in starts])
    times = [_stages(rank, whole) for rank in ranks]
    places = sorted(set().union(*times))
    stages = {
        place: np.array([[one.get(place, {}).get(batch, 0.0) for one in times] for batch in whole]) for place in places
    }
    rest = [_rest(rank, start, whole) for rank, start in zip(ranks, starts, strict=True)]
    slowest = steps.max(0)
    return TraceTimes(
        ranks[0].name,
        _schedule(ranks[0]),
        len(ranks),
        1 + max((micro_batch for stage, micro_batch in places if stage == "dense"), default=0),
        len(whole),
        float(steps.mean(1).max()),
        stages,
        np.array(rest).T,
        float(slowest.max() / slowest.min() - 1),
    )


def _num_ranks(path: Path) -> int:
    path = path / IN_FOLDER if path.is_dir() else path
    try:
        events = json.loads(path.read_text())["traceEvents"]
        return 1 + max(int(event["pid"]) for event in events if event["ph"] == "X")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace that `nestpipe train --trace` has written: {error!r}") from None


def _starts(rank: RankTrace) -> dict[int, float]:
    """Returns when each step began, by batch."""
    starts: dict[int, float] = {}
    for span in rank.spans:
        if span.lane == COMPUTE:
            starts[span.batch] = min(starts.get(span.batch, span.begin), span.begin)
    return starts


def _schedule(rank: RankTrace) -> str:
    lanes = set(rank.lanes)
    overlaps_batches, overlaps_exchanges = bool(lanes & {"host", "route", "input"}), bool(lanes & {"rows", "gradients"})
    names = {(False, False): "serial", (True, False): "inter", (False, True): "intra", (True, True): "nested"}
    return names[overlaps_batches, overlaps_exchanges]


def _stages(rank: RankTrace, batches: Sequence[int]) -> dict[Place, dict[int, float]]:
    """Returns the time of each stage by batch. Spans of the compute lane are waits if the stage has its own lane."""
    own_lane = {span.stage for span in rank.spans if span.lane != COMPUTE}
    times: dict[Place, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in rank.spans:
        is_wait = span.lane == COMPUTE and span.stage in own_lane
        if span.batch in batches and span.stage in STAGES and not is_wait:
            times[span.stage, _micro_batch(span)][span.batch] += span.end - span.begin
    return times


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
