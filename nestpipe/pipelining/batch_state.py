"""The state of a batch on its way through the stages, in phases. `Stages` alone writes it."""

from dataclasses import dataclass, field

from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.exchange import BatchExchange, RowGradients
from nestpipe.embedding.packed import PackedBatch
from nestpipe.embedding.plan_parts import Plan
from nestpipe.embedding.resident import ResidentBatch, ResidentRows
from nestpipe.embedding.route import Route
from nestpipe.pipelining.row_update import RowUpdate


@dataclass
class Requested:
    """After prefetch: the batch was pulled and checked. After upload its distinct keys are known."""

    batch: Batch | None
    """None if this rank is out of data."""
    keys: BatchDedup | PackedBatch | Exception
    """On a device packed until upload has found the distinct keys. An exception travels in the route's header, so that
    all ranks raise it."""


@dataclass
class Routed:
    """After route: owners know which keys the global batch needs."""

    route: Route
    plan: Plan | None
    """Rows and gradients that travel with each micro-batch; None in a world of one."""

    @property
    def has_early_rows(self) -> bool:
        """Returns whether rows are sent before the batch trains: perhaps none, but all ranks take part."""
        return self.route.is_step and self.plan is not None and self.plan.sends.num_early > 0


@dataclass
class Resident:
    """After retrieve: the owned rows are resident."""

    batch: ResidentBatch
    problem: Exception | None
    """Reason of this rank not to apply the step. Commit tells all ranks."""
    is_settled: bool = False
    """True once the residence knows the outcome."""

    @property
    def groups(self) -> list[ResidentRows]:
        return self.batch.groups


@dataclass
class InTraining:
    """After the first rows were sent: no row that the batch uses changes until its gradient has come back."""

    exchange: BatchExchange | None
    """None once the step has ended and late gradients are applied, so that its memory is free."""
    gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """Gradients by micro-batch and group, from the dense part until they are returned."""
    sums: list[RowGradients | None] = field(default_factory=list)
    """Gradients over the global batch, by group; empty before sum_gradients."""
    late: RowUpdate | None = None
    """The update that is still to come; None before the first update, and after the second."""
    outcome: Tensor | None = None
    """Loss of the step and its mask, on the device until the host has read them."""
    is_partially_updated: bool = False
    """True if an update failed halfway: the records belong to no step."""


@dataclass
class Applied:
    """After the update."""

    step: int
    is_masked: bool = False
    """True if this step or an earlier one was not finite, so that it changed no row."""


@dataclass
class BatchState:
    """One batch. A phase is None until its stage has made it."""

    number: int
    requested: Requested | None = None
    """None if the batch was not pulled, because the run has all its steps."""
    routed: Routed | None = None
    """None if no rank has a batch, or after an error."""
    resident: Resident | None = None
    training: InTraining | None = None
    applied: Applied | None = None
    error: Exception | None = None
    """Error that is raised when the turn of this batch comes. Earlier batches are trained normally."""
    is_raised: bool = False
    """True once `error` was raised."""
    is_refused: bool = False
    """True if its training failed: training it again would fail again."""
    is_skipped: bool = False
    """True if its turn came, but its weight is 0."""
    is_left: bool = False
    """True if its step was left before the update."""

    @property
    def is_step(self) -> bool:
        """Returns whether the batch is trained as a step."""
        return self.routed is not None and self.routed.route.is_step and self.error is None

    @property
    def is_end(self) -> bool:
        """Returns whether the data ended before this batch."""
        return self.routed is None and self.error is None

    @property
    def is_untrained(self) -> bool:
        """Returns whether no step has applied the batch, although nothing is wrong with it."""
        is_open = self.applied is None or self.applied.is_masked
        return is_open and not (self.is_raised or self.is_refused or self.is_skipped)
