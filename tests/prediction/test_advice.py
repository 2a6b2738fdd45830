"""What the summary of a run says of another number of micro-batches.

Fails, for example, if advice compares with the step of one micro-batch instead of the run's, or leaves a run without
exposed exchange a remedy.
"""

from nestpipe.prediction.advice import advice
from nestpipe.prediction.work import Way

CROSSING = Way("nested", "nested", cross_batch=True)
NESTED = Way("nested", "nested")


def fields(dense_ms: float, exchange_ms: float, exposed_ms: float) -> dict[str, float]:
    return {
        "step_ms": dense_ms + exposed_ms + 2.0,
        "dense_ms": dense_ms,
        "exposed_exchange_ms": exposed_ms,
        "busy_exchange_ms": exchange_ms,
        "exchanged_row_bytes_per_step": 1e6,
        "exchanged_gradient_bytes_per_step": 1e6,
        "hit_rate": 0.3,
    }


def test_sentences() -> None:
    unsplit = advice(fields(20, 10, 10), NESTED, 1, 4)
    assert unsplit == (
        "16 micro-batches would take about 22.6 ms a step instead of 32.0, if splitting cost nothing: dense compute of "
        "20.0 ms would then cover more of 10.0 ms of exchange"
    )
    short = advice(fields(3, 9, 7), NESTED, 16, 4)
    assert short.startswith("16 micro-batches leave 7.0 ms of exchange exposed, and more would not hide more. Dense ")
    assert "Dense compute of 3.0 ms cannot cover 9.0 ms of exchange: take a larger batch, exchange.hosts" in short
    assert "would give nothing: 0.1 ms of 9.0 ms" in advice(fields(30, 9, 0.1), CROSSING, 2, 4)
    assert "one rank exchanges nothing" in advice(fields(30, 0, 0), CROSSING, 1, 1)
    for schedule, better in (("serial", "intra"), ("inter", "nested")):
        text = advice(fields(30, 0, 9), Way(schedule, schedule), 1, 2)
        assert text.endswith(f'nothing of 9.0 ms of exchange; pipeline.schedule = "{better}" hides it')


def test_a_run_that_was_complete_has_no_step() -> None:
    """Fails if advice divides by the time of a step."""
    assert "no step was trained" in advice(dict.fromkeys(fields(20, 10, 3), 0.0), NESTED, 1, 2)


def test_exchange_across_batches_leaves_less_to_split() -> None:
    """7 of 10 ms travel during other batches already."""
    text = advice(fields(20, 10, 3), CROSSING, 1, 4)
    assert text.startswith("8 micro-batches would take about 22.4 ms a step instead of 25.0")
