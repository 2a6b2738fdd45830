"""Busy times of lanes. Fails if Trace adds up simultaneous work of lanes: an exchange could then be busy for longer
than the step takes, and the allowed speedup would be smaller than the measured one."""

import threading
import time

import pytest
import torch

from nestpipe.pipelining.schedule import Op
from nestpipe.pipelining.trace import Span, Trace


def test_two_lanes_at_once_are_busy_once() -> None:
    trace = Trace()
    trace.begin_batch(0)
    together = threading.Barrier(2)

    def work(stage: str, lane: str) -> None:
        together.wait()
        with trace.lane_span(Op(stage, lane, 0, 0)):
            together.wait()
            time.sleep(0.05)
            together.wait()

    begin = time.perf_counter()
    lanes = [
        threading.Thread(target=work, args=names)
        for names in (("send_rows", "rows"), ("return_gradients", "gradients"))
    ]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    with trace.lane_span(Op("retrieve", "host", 1)):
        time.sleep(0.01)
    with trace.lane_span(Op("write_back", "host", 0)):
        time.sleep(0.01)
    trace.end_step(4)
    took_ms = (time.perf_counter() - begin) * 1e3
    (step,) = trace.steps
    assert step.busy["busy_host_ms"] >= 20
    assert step.busy["busy_exchange_ms"] >= 50
    assert step.busy["busy_exchange_ms"] + step.busy["busy_host_ms"] <= took_ms
    assert "busy_input_ms" not in step.busy  # nothing was read on a lane


class FakeClock:
    """The host's clock. Each reading takes a microsecond."""

    def __init__(self) -> None:
        self.ns = 5_000_000

    def perf_counter_ns(self) -> int:
        self.ns += 1000
        return self.ns


class FakeStream:
    """A stream of a device that works asynchronously and has its own clock."""

    def __init__(self, host: FakeClock) -> None:
        self.host = host
        self.busy_until_ms = 0.0

    def now_ms(self) -> float:
        return self.host.ns / 1e6 + 123_456.0

    def synchronize(self, until_ms: float | None = None) -> None:
        until_ms = self.busy_until_ms if until_ms is None else until_ms
        self.host.ns += max(0, round((until_ms - self.now_ms()) * 1e6))

    def enqueue(self, milliseconds: float) -> None:
        self.busy_until_ms = max(self.busy_until_ms, self.now_ms()) + milliseconds


class FakeEvent:
    def __init__(self, device, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        self.ms = max(stream.busy_until_ms, stream.now_ms())

    def query(self) -> bool:
        return self.ms <= self.stream.now_ms()

    def synchronize(self) -> None:
        self.stream.synchronize(self.ms)

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.ms - self.ms


def test_spans_of_a_device_are_those_of_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host returns at once from work that takes the device long. Fails if Trace._end_on_device makes a Span of the
    host's times, or if _StreamClock does not convert the device's clock to the host's."""
    host = FakeClock()
    compute, rows = FakeStream(host), FakeStream(host)
    current = compute
    monkeypatch.setattr("nestpipe.pipelining.trace.time", host)
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    spans: list[Span] = []
    compute.enqueue(10)  # earlier work does not count
    trace = Trace(None, spans, device=torch.device("cuda", 0))
    began_ns = host.ns
    trace.begin_batch(0)
    with trace.span("dense", 0):
        compute.enqueue(60)
    with trace.span("update"):
        compute.enqueue(30)
    current = rows
    with trace.lane_span(Op("send_rows", "rows", 0, 1)):
        rows.enqueue(40)
    current = compute
    trace.end_step(4)
    assert host.ns < began_ns + 1_000_000  # the device has hardly begun
    assert spans == []
    trace.settle()
    by_stage = {span.stage: span for span in spans}
    assert {stage: (span.lane, span.batch, span.micro_batch) for stage, span in by_stage.items()} == {
        "dense": ("compute", 0, 0),
        "update": ("compute", 0, -1),
        "send_rows": ("rows", 0, 1),
    }
    lasted_ms = {stage: (span.end_ns - span.begin_ns) / 1e6 for stage, span in by_stage.items()}
    assert lasted_ms == pytest.approx({"dense": 60, "update": 30, "send_rows": 40}, abs=0.01)
    began_ms = {stage: (span.begin_ns - began_ns) / 1e6 for stage, span in by_stage.items()}
    assert began_ms == pytest.approx({"dense": 0, "update": 60, "send_rows": 0}, abs=0.02)
    (step,) = trace.steps
    assert step.stages["dense"] == pytest.approx(60, abs=0.01)


def test_a_passing_span_counts_until_the_next_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device it ends where the next stage begins, which returns to the stage around both. Fails if
    Trace.passing_span does not keep the outer stage, or if it records a second event."""
    host = FakeClock()
    compute, events = FakeStream(host), []

    class CountedEvent(FakeEvent):
        def __init__(self, device, enable_timing: bool) -> None:
            super().__init__(device, enable_timing)
            events.append(self)

    monkeypatch.setattr("nestpipe.pipelining.trace.time", host)
    monkeypatch.setattr(torch, "Event", CountedEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute)
    trace = Trace(device=torch.device("cuda", 0))
    trace.begin_batch(0)
    with trace.span("other"):
        compute.enqueue(1)
        before = len(events)
        with trace.passing_span("send_rows", 0):
            compute.enqueue(20)
        compute.enqueue(3)
        with trace.passing_span("dense", 0):
            compute.enqueue(60)
        assert len(events) == before + 2
        with trace.span("update"):
            compute.enqueue(30)
        compute.enqueue(2)
    trace.end_step(4)
    trace.settle()
    (step,) = trace.steps
    lasted = {stage: ms for stage, ms in step.stages.items() if ms > 0.5}
    assert lasted == pytest.approx({"other": 3, "send_rows": 23, "dense": 60, "update": 30}, abs=0.01)
