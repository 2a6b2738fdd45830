"""Trace: spans of named stages on every lane, and the time that no span of the compute lane covers.

On a CPU, spans are measured with the host's clock.

On an accelerator, spans are measured in streams: each change of stage records an event in the lane's stream, and the
duration of a stage is known when the device has reached the event. A span lasts from when the stream reaches the first
kernel of the stage until it has finished the last one, whenever the host enqueued them. A span of another lane includes
the work of its thread on the host. One event at the beginning, whose time both clocks know, converts event times to the
host's clock. In a trace of minutes, spans may be off by the drift of the two clocks, some microseconds per second. Only
BUSY is measured with the host's clock.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock

import torch

from nestpipe.device.ranges import ranges_on
from nestpipe.device.streams import with_streams
from nestpipe.pipelining.schedule import Op
from nestpipe.pipelining.stage import BUSY, COMPUTE, STAGES
from nestpipe.pipelining.stage_work import StageWork
from nestpipe.pipelining.step_times import StepLog, StepTimes


class _Busy:
    """Time in which at least one of several lanes has worked."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._num_working = 0
        self._since = 0
        self._lock = Lock()

    def begin(self, now_ns: int) -> None:
        with self._lock:
            if self._num_working == 0:
                self._since = now_ns
            self._num_working += 1

    def end(self, now_ns: int) -> None:
        with self._lock:
            self._num_working -= 1
            if self._num_working == 0:
                self.total_ns += now_ns - self._since


@dataclass(frozen=True)
class Span:
    lane: str
    stage: str
    batch: int
    micro_batch: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class _StreamSpan:
    """A span whose times only the device knows so far."""

    lane: str
    stage: str
    batch: int
    micro_batch: int
    begin: torch.Event
    end: torch.Event


class _StreamClock:
    """Turns events of a device's streams into times of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        """Waits for the calling thread's stream: in an idle stream an event happens when the host records it."""
        torch.accelerator.current_stream(device).synchronize()
        tries = []
        for _ in range(NUM_TRIES):
            before = time.perf_counter_ns()
            event = _record(device)
            event.synchronize()
            after = time.perf_counter_ns()
            tries.append((after - before, (before + after) // 2, event))
        _, self._zero_ns, self._zero = min(tries, key=lambda tried: tried[0])

    def span(self, span: _StreamSpan) -> Span:
        begin_ns = self._zero_ns + round(self._zero.elapsed_time(span.begin) * 1e6)
        # Relative to the begin, not to zero: torch returns times in single precision, which is coarse for long times.
        end_ns = begin_ns + round(span.begin.elapsed_time(span.end) * 1e6)
        return Span(span.lane, span.stage, span.batch, span.micro_batch, begin_ns, end_ns)


NUM_TRIES = 5
"""Number of tries: the first event of a process takes longer than later ones."""


def _record(device: torch.device) -> torch.Event:
    """Returns an event behind all work that this thread has enqueued."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _range_name(stage: str, batch: int, micro_batch: int) -> str:
    return f"{stage} {batch}" if micro_batch < 0 else f"{stage} {batch}.{micro_batch}"


class _ComputeSpan:
    """A stage of the compute lane while it lasts. A class: a step has dozens, and a generator takes twice as long."""

    __slots__ = ("_micro_batch", "_outer", "_stage", "_switch")

    def __init__(self, switch: Callable[[str, int], tuple[str, int]], stage: str, micro_batch: int) -> None:
        self._switch, self._stage, self._micro_batch = switch, stage, micro_batch

    def __enter__(self) -> None:
        self._outer = self._switch(self._stage, self._micro_batch)

    def __exit__(self, *error: object) -> None:
        self._switch(*self._outer)


class Trace:
    """Measures stages. On the compute lane a nested span interrupts the outer one, so that no time counts twice."""

    def __init__(
        self,
        steps: list[StepTimes] | None = None,
        spans: list[Span] | None = None,
        first_batch: int = 0,
        device: torch.device | None = None,
        traced_batches: range | None = None,
        nvtx: bool = False,
        work: StageWork | None = None,
    ) -> None:
        """traced_batches: batches whose spans are kept; None keeps all, in memory that grows without limit.

        nvtx: whether spans are also ranges of NVTX, for a profiler; on CUDA only. work: gets the work on operations.
        """
        self.steps = steps if steps is not None else StepLog()
        """Steps that were applied."""
        self.spans = spans
        """Spans of all lanes; None if they are not kept."""
        self.work = work if work is not None else StageWork()
        """Work on the last operations of lanes, and on a CPU of the dense part."""
        self._traced_batches = traced_batches
        self._ranges = ranges_on(device, nvtx)
        self.current = StepTimes(-1)
        """The step under way, or the time between two runs."""
        self._first_batch = first_batch
        self._batch = first_batch - 1
        self._stage, self._micro_batch = "", -1
        self._outer: tuple[str, int] | None = None
        """Stage and micro-batch that a passing span has interrupted, as long as it lasts."""
        self._since = time.perf_counter_ns()
        self._device = with_streams(device)
        self._moments: list[tuple[str, torch.Event]] = []
        """On a device: end of each stage of the step under way, after the end of the previous step."""
        self._unsettled: deque[tuple[StepTimes, list[tuple[str, torch.Event]]]] = deque()
        self._stream_spans: deque[_StreamSpan] = deque()
        """On a device: spans whose times are not known yet. Lanes add to them."""
        is_traced = self._device is not None and spans is not None
        self._clock = _StreamClock(self._device) if is_traced and self._device is not None else None
        self._busy: dict[str, _Busy] = {name: _Busy() for name in BUSY}
        self._busy_before = dict.fromkeys(BUSY, 0)

    def begin_batch(self, number: int) -> None:
        """Begins the next batch, which becomes step `number` if it counts."""
        self._switch("", -1)
        self._batch += 1
        self._moments = self._moments[-1:]
        self.current = StepTimes(number)

    def end_step(self, num_samples: int) -> None:
        """Ends a step that was applied."""
        self._switch("", -1)
        before, self._busy_before = self._busy_before, {name: busy.total_ns for name, busy in self._busy.items()}
        self.current.busy = {name: (ns - before[name]) / 1e6 for name, ns in self._busy_before.items() if ns > 0}
        self.current.num_samples = num_samples
        self.current.step_ms = sum(self.current.stages.values())
        self.steps.append(self.current)
        if self._device is not None:
            self._unsettled.append((self.current, self._moments))
            self._moments = self._moments[-1:]
            self.settle(waits=False)
        self.current = StepTimes(-1)

    def settle(self, waits: bool = True) -> None:
        """Fills in the times of steps that the device has finished. waits: waits for the device, and fills in all."""
        while self._unsettled and (waits or self._unsettled[0][1][-1][1].query()):
            step, moments = self._unsettled.popleft()
            moments[-1][1].synchronize()
            for (_, begin), (stage, end) in pairwise(moments):
                step.stages[stage] += begin.elapsed_time(end)
            step.step_ms = sum(step.stages.values())
        while self._stream_spans and (waits or self._stream_spans[0].end.query()):
            span = self._stream_spans.popleft()
            span.end.synchronize()
            assert self.spans is not None
            assert self._clock is not None
            self.spans.append(self._clock.span(span))

    def span(self, stage: str, micro_batch: int = -1) -> AbstractContextManager[None]:
        """Measures work on a stage on the compute lane, or a wait for it."""
        return _ComputeSpan(self._switch, stage, micro_batch)

    def passing_span(self, stage: str, micro_batch: int = -1) -> AbstractContextManager[None]:
        """Measures work that is followed by another stage. On an accelerator it counts until that stage begins:
        one event ends the one and begins the other."""
        if self._device is None:
            return self.span(stage, micro_batch)
        self._outer = self._switch(stage, micro_batch)
        return nullcontext()

    def host_span(self, stage: str) -> AbstractContextManager[None]:
        """Measures work of this thread on the host; nothing on an accelerator, where the stream is busy meanwhile."""
        return self.span(stage) if self._device is None else nullcontext()

    def enter(self, stage: str) -> None:
        """Begins a stage that lasts until the next span or `enter`, which may be in another function."""
        self._switch(stage, -1)

    @contextmanager
    def lane_span(self, op: Op) -> Iterator[None]:
        """Measures an operation on another lane, in that lane's thread."""
        busy = self._busy.get(STAGES[op.stage].busy_field or "")
        batch = self._first_batch + op.batch
        event = _record(self._device) if self._device is not None and self._is_traced(batch) else None
        if self._ranges is not None:
            self._ranges.range_push(_range_name(op.stage, batch, op.micro_batch))
        begin = time.perf_counter_ns()
        if busy is not None:
            busy.begin(begin)
        try:
            yield
        finally:
            end = time.perf_counter_ns()
            if busy is not None:
                busy.end(end)
            if self._ranges is not None:
                self._ranges.range_pop()
            if event is not None and self._device is not None:
                self._stream_spans.append(
                    _StreamSpan(op.lane, op.stage, batch, op.micro_batch, event, _record(self._device))
                )
            elif self.spans is not None and self._is_traced(batch):
                self.spans.append(Span(op.lane, op.stage, batch, op.micro_batch, begin, end))

    def add_bytes(self, name: str, num_bytes: int) -> None:
        self.current.sizes[name] += num_bytes

    def _is_traced(self, batch: int) -> bool:
        return self.spans is not None and (self._traced_batches is None or batch in self._traced_batches)

    def _switch(self, stage: str, micro_batch: int) -> tuple[str, int]:
        now = time.perf_counter_ns()
        if self._device is None:
            self._end_on_host(now)
        else:
            self._end_on_device(self._device)
        if self._ranges is not None:
            if self._stage:
                self._ranges.range_pop()
            if stage:
                self._ranges.range_push(_range_name(stage, self._batch, micro_batch))
        outer = self._outer or (self._stage, self._micro_batch)
        self._stage, self._micro_batch, self._since, self._outer = stage, micro_batch, now, None
        return outer

    def _end_on_host(self, now: int) -> None:
        """Ends the current stage of the compute lane."""
        self.current.stages[self._stage] += (now - self._since) / 1e6
        if self.spans is not None and self._stage and self._is_traced(self._batch):
            self.spans.append(Span(COMPUTE, self._stage, self._batch, self._micro_batch, self._since, now))

    def _end_on_device(self, device: torch.device) -> None:
        moment = _record(device)
        if self._stage and self._is_traced(self._batch):  # a stage has begun, so _moments has an entry
            begin = self._moments[-1][1]
            self._stream_spans.append(_StreamSpan(COMPUTE, self._stage, self._batch, self._micro_batch, begin, moment))
        self._moments.append((self._stage, moment))
