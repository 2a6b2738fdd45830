"""Costs of a batch by its number of micro-batches, the steps that follow, by hand, and the number that is taken.

Fails, for example, if Line.at multiplies by the number itself, if an exchange across batches is sent twice, or if
choice_by takes the largest of equally good numbers.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from nestpipe.pipelining.schedule import Op
from nestpipe.prediction.choose import Choice, choice_by
from nestpipe.prediction.measure import _exchange_cost, _line
from nestpipe.prediction.split_costs import (
    BACKWARD,
    FORWARD,
    ExchangeCost,
    Line,
    SplitCosts,
    Traffic,
    play_split,
    predict_step_ms,
)
from nestpipe.prediction.work import Way

NUMBERS = (1, 2, 4, 8, 16)


def costs(
    dense_ms: float, rows_ms: float, added_ms: float = 0.0, latency_ms: float = 0.0, way: Way | None = None
) -> SplitCosts:
    """Returns costs of two ranks. The gradients take as long as the rows."""
    exchange = ExchangeCost(latency_ms, rows_ms)
    return SplitCosts(
        way=way or Way("intra", "intra"),
        num_ranks=2,
        has_issuer=False,
        stages={FORWARD: Line(dense_ms / 4, added_ms / 2), BACKWARD: Line(3 * dense_ms / 4, added_ms / 2)},
        collectives={"commit": Line(1.0)},
        rows=exchange,
        gradients=exchange,
        traffic={num: Traffic((1 / num,) * num, (1 / num,) * num) for num in NUMBERS},
    )


def test_steps_are_those_of_the_schedule() -> None:
    """Unsplit, intra hides nothing. Split, only the first rows and the last gradients are exposed."""
    unsplit = play_split(costs(80, 8), 1)
    assert unsplit.step_ms == pytest.approx(8 + 80 + 8 + 1)
    assert unsplit.parts["exposed_exchange_ms"] == pytest.approx(16)
    split = play_split(costs(80, 8, added_ms=2.0, latency_ms=0.5), 8)
    assert split.step_ms == pytest.approx(1.5 + (80 + 7 * 2) + 1.5 + 1)
    assert costs(80, 8, latency_ms=0.5).exchange_ms(8) == pytest.approx(2 * (8 * 0.5 + 8))


def test_exchange_across_batches() -> None:
    """Early rows and late gradients travel under the dense compute of an unsplit batch. Each update is done once."""
    traffic = Traffic((0.25,), (0.25,), early_rows=0.75, late_gradients=0.75)
    crossing = replace(
        costs(80, 8, way=Way("nested", "nested", cross_batch=True)),
        traffic={1: traffic},
        stages={**costs(80, 8).stages, "update": Line(4.0), "retrieve": Line(10.0), "write_back": Line(5.0)},
        late_share=0.75,
        hit_rate=0.25,
    )
    assert traffic.all_rows == traffic.all_gradients == 1.0
    assert play_split(crossing, 1).step_ms == pytest.approx(2 + 80 + 2 + 1 + 1)
    assert [crossing.work(Op(stage, "gradients", 0), 1).local_ms for stage in ("update", "late_update")] == [1.0, 3.0]
    assert crossing.work(Op("retrieve", "host", 0), 1).local_ms == 7.5


def test_costs_through_two_points() -> None:
    """A point for each measured number; what gets shorter by splitting is noise."""
    exchange = _exchange_cost((1, 1000.0, 0.5 + 20.0), (8, 1000.0, 8 * 0.5 + 20.0))
    assert (exchange.latency_ms, exchange.ms_per_byte) == pytest.approx((0.5, 0.02))
    grown = _exchange_cost((1, 1000.0, 0.5 + 20.0), (8, 1500.0, 8 * 0.5 + 30.0))  # window = "resend"
    assert (grown.latency_ms, grown.ms_per_byte) == pytest.approx((0.5, 0.02))
    assert _exchange_cost((1, 1000.0, 20.0), (8, 1000.0, 19.0)) == ExchangeCost(0.0, 0.02)
    assert _exchange_cost((1, 0.0, 2.0), (8, 0.0, 16.0)) == ExchangeCost(2.0, 0.0)
    line = _line(np.array([10.0, 20.0]), np.array([17.0, 19.0]), 8)
    assert np.allclose(line.at(4), [13.0, 20.0])


def test_measured_steps_correct_the_prediction() -> None:
    """Unsplit, a step takes 20% longer than it follows from the costs; in 8, as long as it follows; in 2, a third of
    the way."""
    made = costs(100, 50, added_ms=1.0)
    played = {num: play_split(made, num).step_ms for num in NUMBERS}
    corrected = replace(made, measured_step_ms={1: 1.2 * played[1], 8: played[8]})
    factors = {num: predict_step_ms(corrected, num) / played[num] for num in NUMBERS}
    assert factors == pytest.approx({1: 1.2, 2: 1.2 - 0.2 / 3, 4: 1.2 - 0.4 / 3, 8: 1.0, 16: 1.0})


@pytest.mark.parametrize(
    ("made", "chosen"),
    [
        (costs(100, 50), 16),
        (costs(100, 50, added_ms=1.0), 8),  # exposed 100 / N, and 1 for each further micro-batch
        (costs(100, 1), 2),  # 1 ms of 103 is within the margin
        (costs(100, 5, added_ms=10.0), 1),
        (costs(3, 9, latency_ms=3.0), 1),
    ],
)
def test_the_number_that_is_taken(made: SplitCosts, chosen: int) -> None:
    choice = choice_by(made, NUMBERS)
    assert choice.num_micro_batches == chosen
    steps = choice.predicted_step_ms
    assert steps[chosen] <= 1.01 * min(steps.values())
    assert all(steps[num] > 1.01 * min(steps.values()) for num in NUMBERS if num < chosen)
    assert ("cannot cover" in choice.why) == (made.exchange_ms(1) > made.dense_ms(1))


def test_a_choice_is_read_as_it_was_written() -> None:
    choice = choice_by(costs(100, 50), NUMBERS)
    assert Choice.from_json(choice.to_json()) == choice
    for changed, text in (
        ({"num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"num_micro_batches": True}, "num_micro_batches is True"),
        ({"predicted_step_ms": {"a": 1}}, "invalid literal"),
    ):
        with pytest.raises(ValueError, match=text):
            Choice.from_json(json.dumps(json.loads(choice.to_json()) | changed))
