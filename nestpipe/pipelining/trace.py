"""Where the time goes: spans of named stages on every lane, and what no span of the compute lane covers.

On an accelerator the compute lane's time is its stream's: each change of stage is a moment of the stream, and how long
a stage took is known when the device has got there.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock

import torch

from nestpipe.device.streams import has_streams
from nestpipe.pipelining.schedule import COMPUTE, Op

STAGES = {
    "prefetch": "exposed_input_ms",
    "upload": "exposed_lookup_ms",
    "route": "exposed_lookup_ms",
    "retrieve": "exposed_lookup_ms",
    "overlap_sync": "exposed_lookup_ms",
    "write_back": "exposed_lookup_ms",
    "begin": "exposed_exchange_ms",
    "bring": "exposed_exchange_ms",
    "take": "exposed_exchange_ms",
    "dense": "dense_ms",
    "reduce": "exposed_reduce_ms",
    "update": "row_update_ms",
    "other": "other_ms",
    "": "unattributed_ms",
}
"""Stage -> the field of the summary that its time on the compute lane counts in."""

BUSY = {
    "busy_input_ms": ("prefetch",),
    "busy_host_ms": ("retrieve", "write_back"),
    "busy_exchange_ms": ("bring", "take"),
}
"""The time in which at least one of these stages is worked at, on whichever lane."""
_BUSY_FIELD = {stage: name for name, stages in BUSY.items() for stage in stages}

BYTE_FIELDS = (
    "exchanged_row_bytes_per_step",
    "exchanged_gradient_bytes_per_step",
    "exchanged_key_bytes_per_step",
    "retrieved_bytes_per_step",
    "written_back_bytes_per_step",
)


@dataclass
class StepTimes:
    """One step of this rank: from asking for its batch to asking for the next one."""

    number: int
    num_samples: int = 0
    """of the global batch"""
    step_ms: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """milliseconds of each stage on the compute lane, waiting included; they add up to step_ms"""
    busy: dict[str, float] = field(default_factory=dict)
    """BUSY: milliseconds that other lanes worked meanwhile; what the compute lane does itself has none"""
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BYTE_FIELDS, 0))
    """BYTE_FIELDS; exchanged bytes are those to other ranks"""


class _Busy:
    """How long at least one of several lanes has worked: two at the same time take no longer than one."""

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


class Trace:
    """The stage the compute lane is in. A span inside another interrupts it, so that no time counts twice."""

    def __init__(
        self,
        steps: list[StepTimes] | None = None,
        spans: list[Span] | None = None,
        first_batch: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.steps = steps if steps is not None else []
        """those that were applied"""
        self.spans = spans
        """of all lanes, if a list was given to put them in"""
        self.current = StepTimes(-1)
        """the step under way, or the time between two runs"""
        self._first_batch = first_batch
        self._batch = first_batch - 1
        self._stage, self._micro_batch = "", -1
        self._since = time.perf_counter_ns()
        self._device = device if device is not None and has_streams(device) else None
        self._moments: list[tuple[str, torch.Event]] = []
        """of the step under way, on a device: the end of each stage"""
        self._unsettled: deque[tuple[StepTimes, list[tuple[str, torch.Event]]]] = deque()
        self._busy: dict[str, _Busy] = {name: _Busy() for name in BUSY}
        self._busy_before = dict.fromkeys(BUSY, 0)

    def begin_batch(self, number: int) -> None:
        """Everything from here on belongs to the next batch, and to this step if it becomes one."""
        self._switch("", -1)
        self._batch += 1
        self._moments = self._moments[-1:]
        self.current = StepTimes(number)

    def end_step(self, num_samples: int) -> None:
        """The step was applied: it counts."""
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
        """On a device: fills in the times of the steps that it has done; or waits for it, and of all."""
        while self._unsettled and (waits or self._unsettled[0][1][-1][1].query()):
            step, moments = self._unsettled.popleft()
            moments[-1][1].synchronize()
            for (_, begin), (stage, end) in pairwise(moments):
                step.stages[stage] += begin.elapsed_time(end)
            step.step_ms = sum(step.stages.values())

    @contextmanager
    def span(self, stage: str, micro_batch: int = -1) -> Iterator[None]:
        """On the compute lane: work at a stage, or waiting for it."""
        outer = self._switch(stage, micro_batch)
        try:
            yield
        finally:
            self._switch(*outer)

    def host_span(self, stage: str) -> AbstractContextManager[None]:
        """The same of work by this thread alone: on an accelerator its stream has something else to do meanwhile."""
        return self.span(stage) if self._device is None else nullcontext()

    def enter(self, stage: str) -> None:
        """From here to the next span or `enter`: for stages that end in another function than they began in."""
        self._switch(stage, -1)

    @contextmanager
    def lane_span(self, op: Op) -> Iterator[None]:
        """On another lane, in its thread."""
        busy = self._busy.get(_BUSY_FIELD.get(op.stage, ""))
        begin = time.perf_counter_ns()
        if busy is not None:
            busy.begin(begin)
        try:
            yield
        finally:
            end = time.perf_counter_ns()
            if busy is not None:
                busy.end(end)
            if self.spans is not None:
                batch = self._first_batch + op.batch
                self.spans.append(Span(op.lane, op.stage, batch, op.micro_batch, begin, end))

    def add_bytes(self, name: str, num_bytes: int) -> None:
        self.current.sizes[name] += num_bytes

    def _switch(self, stage: str, micro_batch: int) -> tuple[str, int]:
        now = time.perf_counter_ns()
        if self._device is None:
            self.current.stages[self._stage] += (now - self._since) / 1e6
        else:
            moment = torch.Event(self._device, enable_timing=True)
            moment.record(torch.accelerator.current_stream(self._device))
            self._moments.append((self._stage, moment))
        if self.spans is not None and self._stage:
            self.spans.append(Span(COMPUTE, self._stage, self._batch, self._micro_batch, self._since, now))
        outer = self._stage, self._micro_batch
        self._stage, self._micro_batch, self._since = stage, micro_batch, now
        return outer
