"""The ring of operations, and its medians by batch."""

import pytest

from nestpipe.pipelining import stage_work
from nestpipe.pipelining.stage_work import StageWork


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(stage_work.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(stage_work.time, "thread_time", lambda: now[0] / 4)
    return now


def add(work: StageWork, clock: list[float], stage: str, batch: int, milliseconds: float) -> None:
    began = work.begin()
    clock[0] += milliseconds / 1e3
    work.end(stage, batch, began)


def test_operations_of_a_batch_are_added_up(clock: list[float]) -> None:
    """Two micro-batches of 10 and 20 ms. Fails if the median is over operations, or if the first batch counts."""
    work = StageWork()
    for batch in range(5):
        add(work, clock, "send_rows", batch, 10.0)
        add(work, clock, "send_rows", batch, 500.0 if batch == 0 else 20.0)
        add(work, clock, "retrieve", batch, float(batch))
    medians = work.medians(3)
    assert medians["send_rows"] == pytest.approx((30.0, 7.5))
    assert medians["retrieve"] == pytest.approx((3.0, 0.75))


def test_only_the_last_operations_are_kept(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_work, "NUM_KEPT", 10)
    work = StageWork()
    for batch in range(1000):
        add(work, clock, "retrieve", batch, float(batch))
    assert work.medians(1000)["retrieve"][0] == pytest.approx(995.0)
    assert StageWork().medians(10) == {}
