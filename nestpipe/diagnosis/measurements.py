"""Measurements of all ranks as arrays: how late each one is, how long its stages take, how fast its links are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.pipelining.stage import STAGES

Array = NDArray[np.float64]

WAITS = {
    "route": ("route",),
    "row exchange": ("send_early_rows", "send_rows"),
    "gradient return": ("return_gradients", "return_late_gradients"),
    "dense reduction": ("reduce",),
    "commit": ("commit",),
}
"""Stages of the compute lane that wait for a channel's collectives, or do them."""
AGREEING = ("begin", "reduce", "commit")
"""Stages of the compute lane whose time is that of other stages, or of other ranks."""
WORK = tuple(name for name, stage in STAGES.items() if not stage.needs_ranks and name not in AGREEING)
"""Stages in which a rank waits for no other."""
MOST_EXACT = 32
"""Ranks up to which a rank is compared with the median of all others; with more of them, with the median of all."""
NUM_DEVIATIONS = 3.0
"""How sure it must be that a rank is late: the median over n steps is above their quantile 1/2 - NUM_DEVIATIONS / (2
sqrt(n)) with the probability that a normal number is less than so many deviations above its mean."""


@dataclass(frozen=True)
class Links:
    """Rates of the links between hosts, from the host of a row to the host of a column."""

    names: list[str]
    """Names of the hosts; several ranks may be on hosts of one name, as in containers."""
    ranks: list[int]
    """A rank of each host, which has measured its links."""
    mb_per_second: Array
    """[hosts, hosts]; nan where nothing was measured."""


@dataclass(frozen=True)
class Measurements:
    num_ranks: int
    num_steps: int
    step_ms: float
    """Time of a step on the slowest rank."""
    late_ms: dict[str, Array]
    """By channel: milliseconds by which each rank enters the collectives of a step after the others, at least."""
    wait_ms: dict[str, Array]
    """By channel: milliseconds a step in which each rank's compute lane waits for the collectives, or does them."""
    work_ms: dict[str, Array]
    """By stage: milliseconds of a step of each rank."""
    cpu_ms: dict[str, Array]
    """By stage: those of them in which the lane's thread computed; only for stages that lanes do."""
    owned_keys: Array
    links: Links


def measurements_of(records: Sequence[Mapping[str, Any]]) -> Measurements:
    """Returns the measurements that a Recorder has gathered."""
    stages = {stage: np.array([r["stages_ms"][stage] for r in records]) for stage in STAGES}
    on_lanes = [stage for stage in WORK if all(stage in r["work_ms"] for r in records)]
    lane_ms = {stage: np.array([r["work_ms"][stage] for r in records]) for stage in on_lanes}
    num_steps, offsets = records[0]["num_steps"], clock_offsets([r["clock_ns"] for r in records])
    return Measurements(
        num_ranks=len(records),
        num_steps=num_steps,
        step_ms=max(r["step_ms"] for r in records),
        late_ms={
            name: lateness([r["collectives"][name] for r in records], offsets, num_steps)
            for name in records[0]["collectives"]
        },
        wait_ms={name: np.sum([stages[stage] for stage in WAITS[name]], axis=0) for name in WAITS},
        work_ms={stage: lane_ms[stage][:, 0] if stage in lane_ms else stages[stage] for stage in WORK},
        cpu_ms={stage: times[:, 1] for stage, times in lane_ms.items()},
        owned_keys=np.array([r["owned_keys"] for r in records]),
        links=links_of([r["links"] for r in records], offsets),
    )


def others(values: Array) -> Array:
    """Returns, for each rank, the median of the other ranks' values. Ranks are the first axis."""
    num_ranks = len(values)
    if num_ranks > MOST_EXACT:
        return np.broadcast_to(np.median(values, axis=0), values.shape)
    return np.stack([np.median(np.delete(values, rank, axis=0), axis=0) for rank in range(num_ranks)])


def clock_offsets(clocks: Sequence[Sequence[tuple[int, int]]]) -> Array:
    """Returns how far each rank's clock is ahead of rank 0's, in nanoseconds.

    clocks: by rank, when it entered and left some exchanges. From one rank's entering to another's leaving it takes at
    least the time of a message, which is about the same both ways; so their difference is twice the offset.
    """
    entered, left = (np.array([[stamp[i] for stamp in clock] for clock in clocks]) for i in (0, 1))
    there = (left - entered[0]).min(axis=1)
    back = (left[0] - entered).min(axis=1)
    offsets: Array = (there - back) / 2
    return offsets


def lateness(stamps: Sequence[Mapping[str, Any]], offsets: Array, num_steps: int) -> Array:
    """Returns milliseconds by which each rank enters the collectives of a step after the others.

    It is not the median over steps, but a bound that the median is above with near certainty: other work on a machine
    delays ranks in turns, by as much as a slow rank is late.
    """
    first = max(each["first"] for each in stamps)
    end = min(each["first"] + len(each["entered_ns"]) for each in stamps)
    if end - first < num_steps // 2:
        return np.zeros(len(stamps))
    entered = np.array([each["entered_ns"][first - each["first"] : end - each["first"]] for each in stamps])
    entered_ms = (entered - offsets[:, None]) / 1e6
    after = np.maximum(entered_ms - others(entered_ms), 0.0)
    starts = np.linspace(0, end - first, min(num_steps, end - first), endpoint=False).astype(np.int64)
    by_step = np.add.reduceat(after, starts, axis=1)
    quantile = max(0.0, 0.5 - NUM_DEVIATIONS / (2 * np.sqrt(by_step.shape[1])))
    late: Array = np.maximum(np.quantile(by_step - others(by_step), quantile, axis=1), 0.0)
    return late


def links_of(probes: Sequence[Mapping[str, Any]], offsets: Array) -> Links:
    """Returns the rates between hosts: each is that of its fastest message, from when both ranks had entered the
    exchange until the receiver left it."""
    ranks: list[int] = probes[0]["senders"]
    rates = np.full((len(ranks), len(ranks)), np.nan)
    for place, receiver in enumerate(ranks):
        for i, (source, num_bytes, entered, left) in enumerate(probes[receiver]["messages"]):
            began = max(entered - offsets[receiver], probes[source]["messages"][i][2] - offsets[source])
            rate = num_bytes / max(left - offsets[receiver] - began, 1.0) * 1e3
            known = rates[ranks.index(source), place]
            rates[ranks.index(source), place] = rate if np.isnan(known) else max(rate, known)
    return Links([probes[rank]["host"] for rank in ranks], ranks, rates)
