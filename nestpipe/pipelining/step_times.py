"""Times of steps: the last steps one by one, older ones added up."""

from dataclasses import dataclass, field

from nestpipe.pipelining.stage import BUSY, STAGES

BYTE_FIELDS = (
    "exchanged_row_bytes_per_step",
    "exchanged_gradient_bytes_per_step",
    "exchanged_key_bytes_per_step",
    "retrieved_bytes_per_step",
    "written_back_bytes_per_step",
    "owned_keys_per_step",
    "retrieved_keys_per_step",
    "resident_rows",
    "resident_bytes",
)
"""Numbers of a step: bytes, the keys behind the hit rate, and the rows and bytes of the row pool."""

KEPT_STEPS = 1000
"""Steps that a StepLog keeps one by one."""

MOST_BLOCKS = 200
"""Blocks in which it keeps the totals of older steps; an even number, so that they can be merged in pairs."""

FIRST_BLOCK_STEPS = 10


@dataclass
class StepTimes:
    """One step of this rank, from the request for its batch to the request for the next one."""

    number: int
    num_samples: int = 0
    """Samples of the global batch."""
    step_ms: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Milliseconds of each stage on the compute lane, waiting included; they add up to step_ms."""
    busy: dict[str, float] = field(default_factory=dict)
    """Milliseconds that other lanes worked, by field of BUSY. Work of the compute lane is not in it."""
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BYTE_FIELDS, 0))
    """Bytes by field of BYTE_FIELDS. Exchanged bytes are those sent to other ranks."""

    def busy_ms(self, name: str) -> float:
        """Returns the milliseconds of work that a field of BUSY counts, on the lane that does it."""
        return self.busy[name] if name in self.busy else sum(self.stages[stage] for stage in BUSY[name])


@dataclass
class StepTotals:
    """Sums over several steps."""

    num_steps: int = 0
    sums: StepTimes = field(default_factory=lambda: StepTimes(-1, busy=dict.fromkeys(BUSY, 0.0)))

    def add(self, step: StepTimes, num_steps: int = 1) -> None:
        """Adds a step, or the sums over several."""
        self.num_steps += num_steps
        self.sums.num_samples += step.num_samples
        self.sums.step_ms += step.step_ms
        for name in STAGES:
            self.sums.stages[name] += step.stages[name]
        for name in BUSY:
            self.sums.busy[name] += step.busy_ms(name)
        for name in BYTE_FIELDS:
            self.sums.sizes[name] += step.sizes[name]


class StepLog(list[StepTimes]):
    """The times of the last KEPT_STEPS steps, and the totals of all before them. Steps come in by `append` alone.

    A run may have millions of steps. Totals are kept in at most MOST_BLOCKS blocks of equally many steps, so that the
    first tenth of a run can be left out of a mean to within a hundredth of the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.older: list[StepTotals] = []
        """Totals of the steps that are no longer kept, in order."""
        self._block_steps = FIRST_BLOCK_STEPS

    def append(self, step: StepTimes) -> None:
        """Adds a step. Its times may still be filled in while it is one of the last KEPT_STEPS."""
        super().append(step)
        if len(self) > KEPT_STEPS:
            self._forget(self.pop(0))

    def _forget(self, step: StepTimes) -> None:
        if not self.older or self.older[-1].num_steps == self._block_steps:
            if len(self.older) == MOST_BLOCKS:
                self._merge()
            self.older.append(StepTotals())
        self.older[-1].add(step)

    def _merge(self) -> None:
        for first, second in zip(self.older[::2], self.older[1::2], strict=True):
            first.add(second.sums, second.num_steps)
        self.older = self.older[::2]
        self._block_steps *= 2
