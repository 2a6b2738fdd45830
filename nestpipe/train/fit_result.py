"""The result of Trainer.fit, and the hooks that fit calls."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from nestpipe.embedding.budget import DeviceBudget, DeviceBytes
from nestpipe.pipelining.stage_work import StageWork
from nestpipe.pipelining.step_times import StepLog, StepTimes
from nestpipe.pipelining.trace import Span

if TYPE_CHECKING:
    from nestpipe.train.trainer import Trainer


@dataclass
class FitResult:
    """Losses, times and validations of one or more calls of fit."""

    num_steps_before: int = 0
    """Steps of the run before those of this result."""
    losses: list[float] = field(default_factory=list)
    """Loss of each step: the global batch's loss sums, each divided by its weight, added up."""
    num_skipped: int = 0
    """Batches of weight 0."""
    times: list[StepTimes] = field(default_factory=StepLog)
    """Times of the last 1,000 steps on this rank; `times.older` has the totals of earlier steps."""
    work: StageWork = field(default_factory=StageWork)
    """Work of this rank on its last operations."""
    spans: list[Span] | None = None
    """Spans of all lanes; pass a list to collect them."""
    traced_steps: range | None = None
    """Steps whose spans are kept; None for the first 1,000 trained. Batches of weight 0 count as steps here."""
    validations: list[dict[str, float]] = field(default_factory=list)
    """Numbers of each validation, and the step after which it ran."""
    is_stopped: bool = False
    """Whether a callback has ended the training."""
    is_stop_requested: bool = False
    """Whether a rank was asked to stop, by SIGTERM for example; all ranks then stop at the same step."""
    device_bytes: DeviceBytes | None = None
    """Device memory that the embeddings of the largest batch need by the formula; None without a budget."""
    forward_flops_per_sample: float | None = None
    """Floating-point operations of the model's forward on a sample, from the batch that the split check has tried; None
    without that check."""
    peak_device_bytes: int = 0
    """Peak device memory of the embeddings; 0 without a budget."""

    def add_memory(self, budget: DeviceBudget | None) -> None:
        """Takes note of a run's device memory. budget: None if the run had none."""
        if budget is not None:
            if self.device_bytes is None or budget.largest.total > self.device_bytes.total:
                self.device_bytes = budget.largest
            self.peak_device_bytes = max(self.peak_device_bytes, budget.peak_bytes)


class Callback(Protocol):
    """Hook that fit calls on all ranks at a step boundary, when rows are current. Its time counts in no step.

    Put long work in `with trainer.world.busy()`: errors of ranks that wait for this one then name it.
    """

    @property
    def every(self) -> int:
        """Steps between two calls."""

    def __call__(self, trainer: "Trainer", result: FitResult) -> bool:
        """Returns whether to end the training after this step; one rank's True ends it on all ranks."""
