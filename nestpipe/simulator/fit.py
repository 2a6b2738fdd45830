"""Costs that are fitted to real runs: to traces, or to the times of a summary.

A trace has the times of several steps on every rank. Simulated steps take them in turn, so they vary as those did: a
slow rank makes others wait in its next collective. The time of a collective itself is counted from when the last rank
came to it.

A run does not show which of its rows could have been sent early. So exchange across batches is predicted from another
way of training by the overlap of keys, and the other way round by joining what was sent apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nestpipe.pipelining.schedule import OVERLAPPING, WINDOWED, Op
from nestpipe.pipelining.stage import STAGES
from nestpipe.prediction.play import play
from nestpipe.prediction.result import Result, sum_up
from nestpipe.prediction.ways import SCHEDULE_WAYS, operations_of, way_named
from nestpipe.prediction.work import Cost, Times, Way, Work
from nestpipe.simulator.overlap import Overlap
from nestpipe.simulator.trace_times import Place, TraceTimes

COLLECTIVES = {name for name, stage in STAGES.items() if stage.needs_ranks} | {"reduce", "commit"}
SPLIT = ("send_rows", "dense", "return_gradients")
SKIPPED, CYCLES = 5, 4
"""Steps that are left out at the beginning, and how often the measured ones are played after that."""


@dataclass(frozen=True)
class Fitted:
    """Costs of a machine, as one run showed them."""

    name: str
    way: Way
    """How that run trained."""
    num_ranks: int
    num_micro_batches: int
    step_ms: float
    """Step that was measured."""
    stages: Mapping[Place, Times]
    """Milliseconds of each stage: a line for each step, a column for each rank; of a collective, equal numbers."""
    has_issuer: bool = False
    """One thread issued all exchanges of rows."""

    @property
    def has_replicas(self) -> bool:
        """Returns whether some tables were replicated."""
        return ("share_sums", -1) in self.stages


def fit(times: TraceTimes) -> Fitted:
    """Returns the costs that a trace shows. What no span covers counts as other work at the end of a step."""
    other = times.stages.get(("other", -1), 0.0) + times.rest_ms
    stages = {**times.stages, ("other", -1): other}
    if times.num_ranks > 1:
        for place in stages:
            if place[0] in COLLECTIVES:
                stages[place] = np.repeat(times.together_ms[place][:, None], times.num_ranks, axis=1)
    run = times.num_ranks, times.num_micro_batches, times.step_ms
    return Fitted(times.name, times.way, *run, stages, times.has_issuer)


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
    return Fitted(name, way_named(str(summary["schedule"])), num_ranks, num, float(summary["step_ms"]), stages)


def costs_of(
    fitted: Fitted, way: Way, num_micro_batches: int, hit_rate: float = 0.0, overlap: Overlap | None = None
) -> Cost:
    """Returns the cost of every operation of a way of training. Another number of micro-batches splits the same work
    equally.

    hit_rate: share of keys that are resident, by which the host lane's work is less than in the run. overlap: of
    consecutive batches; needed for exchange across batches, if the run had none.
    """
    stages = fitted.stages
    if fitted.way.cross_batch and not way.cross_batch:
        stages = _joined(stages, fitted.num_micro_batches)
    if num_micro_batches != fitted.num_micro_batches:
        stages = _in_equal_parts(stages, fitted.num_micro_batches, num_micro_batches)
    if way.cross_batch and not fitted.way.cross_batch:
        assert overlap is not None
        stages = _parted(stages, num_micro_batches, overlap)
    zeros = np.zeros((1, fitted.num_ranks))
    # Collectives that shared the network in the run share it in the same way again: their times say so already.
    is_shared = fitted.way == way

    def cost(op: Op) -> Work:
        by_step = stages.get((op.stage, op.micro_batch), zeros)
        times: Times = by_step[op.batch % len(by_step)]
        if op.stage in ("retrieve", "write_back"):
            times = times * (1 - hit_rate)
        if op.stage in COLLECTIVES and fitted.num_ranks > 1:
            together_ms = float(times.min())
            return Work(0.0, True, together_ms, 0.0) if is_shared else Work(0.0, True, 0.0, together_ms)
        return Work(times)

    return cost


Stages = Mapping[Place, Times]


def _in_equal_parts(stages: Stages, num_before: int, num_after: int) -> Stages:
    parts = {
        (stage, i): _parts(stages, stage, num_before).sum(0) / num_after for stage in SPLIT for i in range(num_after)
    }
    return {place: times for place, times in stages.items() if place[1] < 0} | parts


def _joined(stages: Stages, num: int) -> Stages:
    """Returns the stages without exchange across batches. Early rows and late gradients are added to the micro-batches
    in proportion to what these have already."""
    joined = dict(stages)
    for stage, across in (("send_rows", "send_early_rows"), ("return_gradients", "return_late_gradients")):
        parts = _parts(stages, stage, num)
        before, added = parts.sum(0), _of(stages, across)
        shares = np.divide(parts, before, out=np.full_like(parts, 1 / num), where=before > 0)
        joined |= {(stage, i): parts[i] + added * shares[i] for i in range(num)}
    joined["update", -1] = _of(stages, "update") + _of(stages, "late_update")
    return joined


def _parted(stages: Stages, num: int, overlap: Overlap) -> Stages:
    """Returns the stages with exchange across batches."""
    rows, gradients = _parts(stages, "send_rows", num), _parts(stages, "return_gradients", num)
    blocked, urgent = overlap.blocked(rows), overlap.urgent(gradients)
    summed, updated = _of(stages, "sum_gradients"), _of(stages, "update")
    return {
        **stages,
        **{("send_rows", i): blocked[i] for i in range(num)},
        **{("return_gradients", i): urgent[i] for i in range(num)},
        ("send_early_rows", -1): rows.sum(0) - blocked.sum(0),
        ("return_late_gradients", -1): gradients.sum(0) - urgent.sum(0),
        ("sum_gradients", -1): overlap.keys * summed,
        ("update", -1): overlap.keys * updated,
        ("late_update", -1): (1 - overlap.keys) * (summed + updated),
    }


def _parts(stages: Stages, stage: str, num: int) -> Times:
    """Returns the times of a stage, by micro-batch."""
    return np.stack([_of(stages, stage, i) for i in range(num)])


def _of(stages: Stages, stage: str, micro_batch: int = -1) -> Times:
    some = next(iter(stages.values()))
    return stages.get((stage, micro_batch), np.zeros_like(some))


def predict(
    fits: Sequence[Fitted], way: Way, num_micro_batches: int, hit_rate: float = 0.0, overlap: Overlap | None = None
) -> Result:
    """Returns what a way of training would take where these runs were made, by the run with the same number of
    micro-batches if there is one."""
    fitted = nearest(fits, way, num_micro_batches)
    hits = hit_rate if way.schedule in OVERLAPPING and fitted.way.schedule not in OVERLAPPING else 0.0
    return sum_up(
        play(
            operations_of(way, num_micro_batches, fitted.num_ranks, fitted.has_issuer, fitted.has_replicas),
            costs_of(fitted, way, num_micro_batches, hits, overlap),
            SKIPPED + CYCLES * max(len(times) for times in fitted.stages.values()),
            fitted.num_ranks,
            has_issuer=fitted.has_issuer,
        )
    )


def nearest(fits: Sequence[Fitted], way: Way, num_micro_batches: int) -> Fitted:
    """Returns the run that predicts a way of training."""
    return min(fits, key=lambda one: (abs(one.num_micro_batches - num_micro_batches), one.way != way))


def fit_error(fitted: Fitted) -> float:
    """Returns by how much the fitted costs, played in the way of the run itself, miss its step."""
    return predict([fitted], fitted.way, fitted.num_micro_batches).step_ms / fitted.step_ms - 1


def predictions(
    fits: Sequence[Fitted], num_micro_batches: int, hit_rate: float = 0.0, overlap: Overlap | None = None
) -> dict[tuple[Way, int], Result]:
    """Returns what nestpipe would take, by way and number of micro-batches. Ways that may do without splitting are
    predicted for the numbers of the runs, too."""
    numbers = {fitted.num_micro_batches for fitted in fits} | {num_micro_batches}
    return {
        (way, num): predict(fits, way, num, hit_rate, overlap)
        for way in SCHEDULE_WAYS
        if not way.is_stale
        for num in ([num_micro_batches] if _must_split(way) else sorted(numbers))
    }


def _must_split(way: Way) -> bool:
    return way.schedule in WINDOWED and not way.cross_batch
