"""Costs that are fitted to real runs: to traces, or to the times of a summary.

A trace has the times of several steps on every rank. Simulated steps take them in turn, so they vary as those did: a
slow rank makes others wait in its next collective. The time of a collective itself is counted from when the last rank
came to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nestpipe.pipelining.schedule import OVERLAPPING, SCHEDULES, WINDOWED, Op
from nestpipe.pipelining.stage import STAGES
from nestpipe.simulator.play import play
from nestpipe.simulator.result import Result, sum_up
from nestpipe.simulator.trace_times import Place, TraceTimes
from nestpipe.simulator.ways import operations_of
from nestpipe.simulator.work import Cost, Times, Way, Work

COLLECTIVES = {name for name, stage in STAGES.items() if stage.needs_ranks} | {"reduce", "commit"}
SPLIT = ("send_rows", "dense", "return_gradients")
SKIPPED, CYCLES = 5, 4
"""Steps that are left out at the beginning, and how often the measured ones are played after that."""


@dataclass(frozen=True)
class Fitted:
    """Costs of a machine, as one run showed them."""

    name: str
    schedule: str
    """Schedule of that run."""
    num_ranks: int
    num_micro_batches: int
    step_ms: float
    """Step that was measured."""
    stages: Mapping[Place, Times]
    """Milliseconds of each stage: a line for each step, a column for each rank; of a collective, equal numbers."""


def fit(times: TraceTimes) -> Fitted:
    """Returns the costs that a trace shows. What no span covers counts as other work at the end of a step."""
    other = times.stages.get(("other", -1), 0.0) + times.rest_ms
    stages = {**times.stages, ("other", -1): other}
    if times.num_ranks > 1:
        for place in stages:
            if place[0] in COLLECTIVES:
                stages[place] = np.repeat(times.together_ms[place][:, None], times.num_ranks, axis=1)
    return Fitted(times.name, times.schedule, times.num_ranks, times.num_micro_batches, times.step_ms, stages)


def fit_summary(name: str, summary: Mapping[str, float | int | str], num_ranks: int) -> Fitted:
    """Returns the costs that the summary of a serial run shows. It does not tell the stages of a look-up apart, so all
    of it counts as the host lane's; the exchange is divided equally between its micro-batches, and both ways."""

    def of(field: str) -> Times:
        return np.full((1, num_ranks), float(summary.get(field, 0.0)))

    num = int(summary["num_micro_batches"])
    rows, gradients = of("send_rows_ms"), of("return_gradients_ms")
    if not (rows + gradients).any():
        rows = gradients = of("exposed_exchange_ms") / 2
    stages: dict[Place, Times] = {
        ("prefetch", -1): of("exposed_input_ms"),
        ("retrieve", -1): of("exposed_lookup_ms"),
        ("reduce", -1): of("exposed_reduce_ms"),
        ("update", -1): of("row_update_ms"),
        ("other", -1): of("other_ms") + of("unattributed_ms"),
    }
    for i in range(num):
        stages |= {("send_rows", i): rows / num, ("dense", i): of("dense_ms") / num}
        stages |= {("return_gradients", i): gradients / num}
    return Fitted(name, str(summary["schedule"]), num_ranks, num, float(summary["step_ms"]), stages)


def costs_of(fitted: Fitted, num_micro_batches: int, hit_rate: float = 0.0) -> Cost:
    """Returns the cost of every operation. Another number of micro-batches splits the same work equally.

    hit_rate: share of keys that are resident, by which the host lane's work is less than in the run.
    """

    zeros = np.zeros((1, fitted.num_ranks))

    def cost(op: Op) -> Work:
        if op.micro_batch >= 0 and num_micro_batches != fitted.num_micro_batches:
            parts = [fitted.stages.get((op.stage, i), zeros) for i in range(fitted.num_micro_batches)]
            by_step = sum(parts, zeros) / num_micro_batches
        else:
            by_step = fitted.stages.get((op.stage, op.micro_batch), zeros)
        times: Times = by_step[op.batch % len(by_step)]
        if op.stage in ("retrieve", "write_back"):
            times = times * (1 - hit_rate)
        if op.stage in COLLECTIVES and fitted.num_ranks > 1:
            return Work(0.0, True, 0.0, float(times.min()))
        return Work(times)

    return cost


def predict(fits: Sequence[Fitted], schedule: str, num_micro_batches: int, hit_rate: float = 0.0) -> Result:
    """Returns what a schedule would take where these runs were made, by the run with the same number of micro-batches
    if there is one."""
    fitted = min(fits, key=lambda one: abs(one.num_micro_batches - num_micro_batches))
    hits = hit_rate if schedule in OVERLAPPING and fitted.schedule not in OVERLAPPING else 0.0
    way = Way(schedule, schedule)
    return sum_up(
        play(
            operations_of(way, num_micro_batches, fitted.num_ranks),
            costs_of(fitted, num_micro_batches, hits),
            SKIPPED + CYCLES * max(len(times) for times in fitted.stages.values()),
            fitted.num_ranks,
        )
    )


def fit_error(fitted: Fitted) -> float:
    """Returns by how much the fitted costs, played in the schedule of the run itself, miss its step."""
    return predict([fitted], fitted.schedule, fitted.num_micro_batches).step_ms / fitted.step_ms - 1


def predictions(fits: Sequence[Fitted], num_micro_batches: int, hit_rate: float = 0.0) -> dict[tuple[str, int], Result]:
    """Returns what every schedule would take, by schedule and number of micro-batches. Those without overlapping
    exchanges are predicted for the numbers of the runs, too."""
    numbers = {fitted.num_micro_batches for fitted in fits} | {num_micro_batches}
    return {
        (schedule, num): predict(fits, schedule, num, hit_rate)
        for schedule in SCHEDULES
        for num in ([num_micro_batches] if schedule in WINDOWED else sorted(numbers))
    }
