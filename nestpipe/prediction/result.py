"""Sums up what was played: the fields of a summary, and how busy each lane is."""

from dataclasses import dataclass

import numpy as np

from nestpipe.pipelining.stage import STAGES
from nestpipe.prediction.play import Played

FIELDS = (
    *("dense_ms", "row_update_ms", "exposed_input_ms", "exposed_lookup_ms", "exposed_exchange_ms"),
    *("exposed_reduce_ms", "other_ms"),
)
"""Fields of the summary of a run that add up to its step."""
LANES = ("compute", "input", "upload", "route", "host", "rows", "gradients")
"""Lanes of which every record has the utilisation; others are left out."""


@dataclass(frozen=True)
class Result:
    step_ms: float
    """Mean over steps, of the slowest worker."""
    parts: dict[str, float]
    """Means over steps and workers, by field of FIELDS."""
    busy_shares: dict[str, float]
    """Share of the time in which a lane works, by lane."""


def sum_up(played: Played) -> Result:
    """Sums up all steps but the first 5, or the first tenth."""
    steps = len(played.starts) - 1
    first = min(max(5, steps // 10), steps - 1)
    spent = played.starts[steps] - played.starts[first]
    counted = range(first, steps)
    parts = dict.fromkeys(FIELDS, 0.0)
    for step in counted:
        for stage, times in played.stages[step].items():
            parts[STAGES[stage].time_field] += float(times.mean()) / len(counted)
    whole = range(first, max(first + 1, steps - 1))  # the last batch may be written back after the end
    busy = dict.fromkeys(LANES, 0.0)
    for (lane, batch), times in played.busy.items():
        if batch in whole:
            busy[lane] = busy.get(lane, 0.0) + float(times.mean()) / len(whole)
    mean_ms = float(np.mean(spent)) / len(counted)
    return Result(float(spent.max()) / len(counted), parts, {lane: ms / mean_ms for lane, ms in busy.items()})
