"""Where the time of a step goes, on the compute lane: spans of named stages, and what no span covers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STAGES = {
    "prefetch": "exposed_input_ms",
    "route": "exposed_lookup_ms",
    "retrieve": "exposed_lookup_ms",
    "write_back": "exposed_lookup_ms",
    "bring": "exposed_exchange_ms",
    "take": "exposed_exchange_ms",
    "dense": "dense_ms",
    "reduce": "exposed_reduce_ms",
    "update": "row_update_ms",
    "other": "other_ms",
    "": "unattributed_ms",
}
"""Stage -> the field of the summary that its time counts in."""

LANES = {"busy_host_ms": ("retrieve", "write_back"), "busy_exchange_ms": ("bring", "take")}
"""The time a lane spends working, whoever waits for it."""
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
    """milliseconds of each stage; they add up to step_ms"""
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BYTE_FIELDS, 0))
    """BYTE_FIELDS; exchanged bytes are those to other ranks"""


class Trace:
    """The stage the compute lane is in. A span inside another interrupts it, so that no time counts twice."""

    def __init__(self, steps: list[StepTimes] | None = None) -> None:
        self.steps = steps if steps is not None else []
        """those that were applied"""
        self.current = StepTimes(-1)
        """the step under way, or the time between two runs"""
        self._stage = ""
        self._since = time.perf_counter_ns()

    def begin_step(self, number: int) -> None:
        """Everything from here on belongs to this step."""
        self._switch("")
        self.current = StepTimes(number)

    def end_step(self, num_samples: int) -> None:
        """The step was applied: it counts."""
        self._switch("")
        self.current.num_samples = num_samples
        self.current.step_ms = sum(self.current.stages.values())
        self.steps.append(self.current)
        self.current = StepTimes(-1)

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        outer = self._switch(stage)
        try:
            yield
        finally:
            self._switch(outer)

    def enter(self, stage: str) -> None:
        """From here to the next span or `enter`: for stages that end in another function than they began in."""
        self._switch(stage)

    def add_bytes(self, name: str, num_bytes: int) -> None:
        self.current.sizes[name] += num_bytes

    def _switch(self, stage: str) -> str:
        now = time.perf_counter_ns()
        self.current.stages[self._stage] += (now - self._since) / 1e6
        outer, self._stage, self._since = self._stage, stage, now
        return outer
