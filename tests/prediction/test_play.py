"""The timeline of each schedule, computed by hand, and against a slow oracle of the executor's rules.

Fails, for example, if a lane may start before the compute lane has come to its operation, or if a collective ends
before the slowest worker has come to it.
"""

import itertools
import random
from collections.abc import Mapping

import numpy as np
import pytest

from nestpipe.pipelining.schedule import SCHEDULES, Op
from nestpipe.pipelining.stage import COMPUTE
from nestpipe.prediction.play import Played, play
from nestpipe.prediction.result import sum_up
from nestpipe.prediction.ways import operations_of
from nestpipe.prediction.work import Way, Work

COSTS = {
    **{"prefetch": 1, "upload": 2, "route": 3, "retrieve": 4, "begin": 0, "send_rows": 5, "dense": 10},
    **{"return_gradients": 6, "reduce": 1, "commit": 1, "sum_gradients": 1, "update": 2, "write_back": 3, "other": 0},
    **{"send_early_rows": 7, "return_late_gradients": 8, "late_update": 2},
}


def play_schedule(
    schedule: str,
    num: int,
    costs: Mapping[str, float],
    steps: int = 20,
    cross_batch: bool = False,
    has_issuer: bool = False,
) -> Played:
    def cost(op: Op) -> Work:
        is_optimizer = op.stage == "dense" and op.micro_batch < 0
        return Work(0.0 if is_optimizer else float(costs[op.stage]))

    operations = operations_of(Way(schedule, schedule, cross_batch=cross_batch), num, 2, has_issuer)
    return play(operations, cost, steps, 1, has_issuer=has_issuer)


@pytest.mark.parametrize(
    ("schedule", "num", "step", "lookup", "exchange"),
    [
        ("serial", 1, 39, 2 + 3 + 4 + 3, 5 + 6),
        ("serial", 2, 60, 2 + 3 + 4 + 3, 2 * (5 + 6)),
        # 5 + 10 + 6 + 1 + 1 + 1 + 2: everything else is on other lanes.
        ("inter", 1, 26, 0, 5 + 6),
        # 1 + 2 + 3 + 4; send 0 until 15, dense until 25 and 35, return 1 until 41; then 1 + 1 + 1 + 2 + 3.
        ("intra", 2, 49, 2 + 3 + 4 + 3, 5 + 6),
        # send 0 until 5, dense until 25, return 1 until 31, then 1 + 1 + 1 + 2.
        ("nested", 2, 36, 0, 5 + 6),
    ],
)
def test_timelines_by_hand(schedule: str, num: int, step: float, lookup: float, exchange: float) -> None:
    result = sum_up(play_schedule(schedule, num, COSTS))
    assert result.step_ms == pytest.approx(step)
    assert result.parts["exposed_lookup_ms"] == pytest.approx(lookup)
    assert result.parts["exposed_exchange_ms"] == pytest.approx(exchange)
    assert sum(result.parts.values()) == pytest.approx(step)


def test_a_slow_host_lane_by_hand() -> None:
    """The host lane starts after send 0, at 5: write_back until 15, retrieve until 55. Training ends at 36."""
    result = sum_up(play_schedule("nested", 2, {**COSTS, "retrieve": 40, "write_back": 10}))
    assert result.step_ms == pytest.approx(55)
    assert result.parts["exposed_lookup_ms"] == pytest.approx(19)
    assert result.busy_shares["host"] == pytest.approx(50 / 55)
    # In inter it starts with the batch, so a step is what the host lane takes.
    result = sum_up(play_schedule("inter", 1, {**COSTS, "retrieve": 40, "write_back": 10}))
    assert result.step_ms == pytest.approx(50)


@pytest.mark.parametrize("has_issuer", [False, True])
@pytest.mark.parametrize(
    ("num", "costs", "step", "exchange"),
    [
        # send until 2, dense until 32, return until 35, then 1 + 1 + 1 + 1. Early rows and late gradients are hidden.
        (1, {"send_rows": 2, "dense": 30, "return_gradients": 3, "update": 1}, 39, 2 + 3),
        # send 0 until 5; late gradients until 13, applied until 15, when dense 0 ends. The rest is as without them.
        (2, {}, 36, 5 + 6),
        # Late gradients until 25, applied until 27: return 0 until 33, return 1 until 39. Dense ends at 25.
        (2, {"return_late_gradients": 20}, 44, 5 + 14),
        # send 0 until 24. Late gradients until 32, applied until 34: early rows wait for that, and travel until 74.
        # Training ends at 55. So early rows of the next batch travel until 19 after that, and its send 0 until 24.
        (2, {"send_early_rows": 40}, 55, 24 + 6),
    ],
)
def test_exchange_across_batches_by_hand(
    num: int, costs: Mapping[str, float], step: float, exchange: float, has_issuer: bool
) -> None:
    result = sum_up(play_schedule("nested", num, {**COSTS, **costs}, cross_batch=True, has_issuer=has_issuer))
    assert result.step_ms == pytest.approx(step)
    assert result.parts["exposed_exchange_ms"] == pytest.approx(exchange)
    assert result.parts["exposed_lookup_ms"] == 0
    assert sum(result.parts.values()) == pytest.approx(step)


def test_a_slow_host_lane_across_batches_by_hand() -> None:
    """Batch b begins at 0, when the host lane is through with it, and its early rows still travel until 4.

    send 0 until 9, retrieve until 49, write_back until 52: then b + 1 begins. Training ends at 40.
    """
    costs = {**COSTS, "retrieve": 40}
    result = sum_up(play_schedule("nested", 2, costs, cross_batch=True))
    assert result.step_ms == pytest.approx(52)
    assert result.parts["exposed_lookup_ms"] == pytest.approx(12)
    assert result.parts["exposed_exchange_ms"] == pytest.approx(9 + 6)
    # With early rows, the issuer waits for retrieve, from 5 until 45. So return 1, after them, ends at 51, not at 31.
    result = sum_up(play_schedule("nested", 2, costs, cross_batch=True, has_issuer=True))
    assert result.step_ms == pytest.approx(56)
    assert result.parts["exposed_lookup_ms"] == 0
    assert result.parts["exposed_exchange_ms"] == pytest.approx(5 + 26)


ON_HOST = ("prefetch", "upload", "route", "retrieve", "write_back")


def slow_ends(way: Way, num: int, costs: Mapping[str, float], steps: int, has_issuer: bool) -> dict[object, float]:
    """Plays one worker in the order of the list, by the rules of the executor, one operation at a time."""
    ends: dict[object, float] = {}
    free: dict[str, float] = {}
    issued = 0.0
    for op in operations_of(way, num, 2, has_issuer):
        if op.lane == COMPUTE and op.batch == steps:
            return {**ends, "end": free[COMPUTE]}
        starts = [free.get(op.lane, 0.0), free.get(COMPUTE, 0.0), *(ends[name] for name in op.waits_for)]
        if has_issuer and op.lane in ("rows", "gradients"):
            issued = max([issued, *(ends[name] for name in op.waits_for if name[0] in ON_HOST)])
            starts.append(issued)
        is_optimizer = op.stage == "dense" and op.micro_batch < 0
        ends[op.name] = free[op.lane] = max(starts) + (0.0 if is_optimizer else costs[op.stage])
    raise AssertionError


@pytest.mark.parametrize("has_issuer", [False, True])
@pytest.mark.parametrize(
    ("schedule", "cross_batch"), [*((schedule, False) for schedule in SCHEDULES), ("nested", True)]
)
def test_against_a_slow_oracle(schedule: str, cross_batch: bool, has_issuer: bool) -> None:
    drawn = random.Random(1)
    for num in (1, 3):
        for _ in range(5):
            costs = {stage: drawn.choice([0.0, drawn.uniform(1, 20)]) for stage in COSTS}
            played = play_schedule(schedule, num, costs, 8, cross_batch, has_issuer)
            slow = slow_ends(Way(schedule, schedule, cross_batch=cross_batch), num, costs, 8, has_issuer)
            assert float(played.starts[8][0]) == pytest.approx(slow["end"])


def test_a_collective_waits_for_the_slowest_worker() -> None:
    """Worker 1 computes for 15 instead of 10, so worker 0 waits in the gradients' exchange."""

    def cost(op: Op) -> Work:
        if op.stage == "dense" and op.micro_batch == 0:
            return Work(np.array([10.0, 15.0]))
        return Work(0.0, True, 1.0, 4.0) if op.stage == "return_gradients" else Work()

    played = play(operations_of(Way("serial", "serial"), 1, 2), cost, 8, 2)
    step = played.stages[7]
    assert step["dense"].tolist() == [10, 15]
    assert step["return_gradients"].tolist() == [10, 5]
    assert played.busy["compute", 7].tolist() == [15, 20]  # a wait for another worker is no work


def test_collectives_share_the_network() -> None:
    """Rows of micro-batch 1 and gradients of micro-batch 0 travel at the same time, each at half the rate."""

    def cost(op: Op) -> Work:
        if op.stage == "send_rows":
            return Work(0.0, True, 0.0, 8.0 if op.micro_batch == 1 else 1.0)
        if op.stage == "return_gradients":
            return Work(0.0, True, 0.0, 3.0 if op.micro_batch == 0 else 0.0)
        return Work(2.0 if op.stage == "dense" and op.micro_batch >= 0 else 0.0)

    played = play(operations_of(Way("intra", "intra"), 2, 2), cost, 1, 1, traced=range(1))
    ends = {(span.stage, span.micro_batch): span.end_ns / 1e6 for span in played.spans[0] if span.lane != COMPUTE}
    # Rows 1 are alone from 1 to 3, then share until 9 with gradients 0: 2 + 3 of 8 are done. The other 3 take until 12.
    assert ends == {("send_rows", 0): 1, ("return_gradients", 0): 9, ("send_rows", 1): 12}


def test_spans_of_the_compute_lane_do_not_overlap() -> None:
    played = play(
        operations_of(Way("nested", "nested"), 2, 2), lambda op: Work(float(COSTS[op.stage])), 6, 1, traced=range(1)
    )
    spans = sorted((s for s in played.spans[0] if s.lane == COMPUTE), key=lambda span: span.begin_ns)
    assert all(first.end_ns <= second.begin_ns for first, second in itertools.pairwise(spans))
