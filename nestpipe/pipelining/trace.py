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
    "busy_host_ms": ("retrieve", "write_back"),
    "busy_exchange_ms": ("bring", "take"),
}
"""The time spent working at these stages, on whichever lane."""

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
    """milliseconds of each stage that other lanes worked on meanwhile"""
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BYTE_FIELDS, 0))
    """BYTE_FIELDS; exchanged bytes are those to other ranks"""


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
        self._busy_ns: dict[str, int] = {}
        self._busy_before: dict[str, int] = {}

    def begin_batch(self, number: int) -> None:
        """Everything from here on belongs to the next batch, and to this step if it becomes one."""
        self._switch("", -1)
        self._batch += 1
        self._moments = self._moments[-1:]
        self.current = StepTimes(number)

    def end_step(self, num_samples: int) -> None:
        """The step was applied: it counts."""
        self._switch("", -1)
        busy, self._busy_before = self._busy_before, dict(self._busy_ns)
        self.current.busy = {stage: (ns - busy.get(stage, 0)) / 1e6 for stage, ns in self._busy_before.items()}
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
        """On another lane, in its thread. A stage is always on the same lane, so nobody else adds to its sum."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            end = time.perf_counter_ns()
            self._busy_ns[op.stage] = self._busy_ns.get(op.stage, 0) + end - begin
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
