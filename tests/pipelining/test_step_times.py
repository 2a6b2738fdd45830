"""Times of a run of any length are kept in bounded memory, with means as if every step were kept.

Fails, for example, if StepLog.append keeps every step, if _forget or _merge lose some, or if StepTotals.add leaves out
the compute lane's own part of BUSY.
"""

from itertools import chain

import pytest

from nestpipe import World
from nestpipe.pipelining.stage import BUSY, STAGES
from nestpipe.pipelining.step_times import KEPT_STEPS, MOST_BLOCKS, StepLog, StepTimes
from nestpipe.pipelining.trace import Span, Trace
from nestpipe.recipe.summary import STEP_FIELDS, counted, step_value, summarise
from nestpipe.train.fit_result import FitResult
from tests.exactness.cases import Case, global_batches, make_trainer


def step_of(number: int) -> StepTimes:
    step = StepTimes(number, num_samples=number % 7, step_ms=float(number))
    step.stages |= {stage: number * (i + 1.0) for i, stage in enumerate(STAGES)}
    step.sizes |= {name: number + i for i, name in enumerate(step.sizes)}
    if number % 2:
        step.busy = dict.fromkeys(BUSY, 3.0 * number)
    return step


def left_out(num_steps: int) -> int:
    return min(max(5, num_steps // 10), num_steps - 1)


@pytest.mark.parametrize("num_steps", [0, 1, 4, 6, 60, KEPT_STEPS, KEPT_STEPS + 7, 5000, 23_456])
def test_means_of_runs_of_any_length(num_steps: int) -> None:
    log = StepLog()
    for number in range(num_steps):
        log.append(step_of(number))
    assert len(log) == min(num_steps, KEPT_STEPS)
    assert len(log.older) <= MOST_BLOCKS
    assert sum(block.num_steps for block in log.older) + len(log) == num_steps
    totals = counted(log)
    num_left_out = num_steps - totals.num_steps
    exact = left_out(num_steps) if num_steps else 0
    if num_steps <= KEPT_STEPS:
        assert num_left_out == exact
    assert exact <= num_left_out <= exact + max(10, num_steps / 100)
    steps = [step_of(number) for number in range(num_left_out, num_steps)]
    for name in STEP_FIELDS:
        assert step_value(totals.sums, name) == pytest.approx(sum(step_value(step, name) for step in steps))
    assert totals.sums.num_samples == sum(step.num_samples for step in steps)
    summary = summarise(log, World()).fields
    assert summary["step_ms"] == pytest.approx(sum(step.step_ms for step in steps) / max(len(steps), 1))


def test_a_trace_keeps_the_last_steps_and_the_named_spans() -> None:
    """Fails if Trace makes its own list of steps, or if _is_traced is always true."""
    spans: list[Span] = []
    trace = Trace(None, spans, first_batch=5, traced_batches=range(10, 13))
    for number in range(KEPT_STEPS + 50):
        trace.begin_batch(number)
        with trace.span("dense"):
            pass
        trace.end_step(1)
    assert [len(trace.steps), trace.steps[0].number] == [KEPT_STEPS, 50]
    assert [(span.batch, span.stage) for span in spans] == [(batch, "dense") for batch in (10, 11, 12)]


@pytest.mark.parametrize("traced", [None, range(2, 4)])
def test_fit_traces_the_first_steps_or_those_named(traced: range | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses several calls of fit with one result. Fails if fit traces the first steps of each call."""
    monkeypatch.setattr("nestpipe.train.trainer.TRACED_STEPS", 3)
    trainer = make_trainer(World(), Case("sgd", "pooled_sum", 1, schedule="inter"))
    trainer.fit(global_batches(1))
    result = FitResult(spans=[], traced_steps=traced)
    for batches in (global_batches(2), global_batches(4)):
        trainer.fit(batches, result=result)
    assert len(result.times) == len(result.losses) == 6
    assert {span.batch for span in result.spans} == {*(traced or range(1, 4))}
    assert {span.lane for span in result.spans} >= {"compute", "input", "host"}


def test_losses_and_times_of_several_results_can_be_joined() -> None:
    first, second = FitResult(), FitResult()
    first.times.append(step_of(1))
    second.times.append(step_of(2))
    assert [step.number for step in chain(first.times + second.times, first.times[:1])] == [1, 2, 1]
