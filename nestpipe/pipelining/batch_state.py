"""The state of a batch on its way through the stages, in phases. `Stages` alone writes it."""

from dataclasses import dataclass, field

from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.exchange import BatchExchange
from nestpipe.embedding.plan import Plan
from nestpipe.embedding.resident import Overlap, ResidentRows
from nestpipe.embedding.route import Route


@dataclass
class Requested:
    """After prefetch: the batch was pulled, and its keys deduped."""

    batch: Batch | None
    """None: this rank is out of data"""
    keys: BatchDedup | Exception
    """an exception travels in the route's header, so that all ranks raise it"""


@dataclass
class Routed:
    """After route: owners know which keys the global batch needs."""

    route: Route
    plan: Plan | None
    """what travels with which micro-batch; None in a world of one"""


@dataclass
class Resident:
    """After retrieve: the owned rows are at hand."""

    groups: list[ResidentRows]
    overlap: list[Overlap] | None
    """slots shared with the batch before; None: all rows came from the host store"""
    problem: Exception | None
    """why the step must not be applied, found by this rank; commit tells all"""
    has_unwritten: bool = False
    """whether the records of the overlap are newer than those in the host store"""


@dataclass
class InTraining:
    """From begin on: rows are frozen until the update."""

    exchange: BatchExchange | None
    """None once the step has ended, so that its memory is free"""
    gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """by micro-batch and group, from the dense part until they are returned"""
    sums: list[Tensor | None] = field(default_factory=list)
    """by group: the gradient of each slot, over the global batch; after sum_gradients"""
    outcome: Tensor | None = None
    """on a device: the step's loss, and whether it is masked, which the host does not know yet"""
    is_partially_updated: bool = False
    """whether the update failed halfway: the records belong to no step"""


@dataclass
class Applied:
    """After the update."""

    step: int
    is_masked: bool = False
    """whether this step, or one before it, was not finite: then it changed no row"""
    is_written: bool = False
    """whether it was written back, except for what stays for the next batch"""


@dataclass
class BatchState:
    """One batch. A phase is None until its stage has made it."""

    number: int
    requested: Requested | None = None
    """None: not pulled, because the run has all the steps it was asked for"""
    routed: Routed | None = None
    """None: no rank has a batch, or there was an error"""
    resident: Resident | None = None
    training: InTraining | None = None
    applied: Applied | None = None
    error: Exception | None = None
    """raised when this batch is to be trained: those before it are trained as if nothing had happened"""
    is_raised: bool = False
    """whether that has happened"""
    is_refused: bool = False
    """whether its training failed: to train it again would fail again"""
    is_skipped: bool = False
    """whether its turn came, but its weight is 0"""
    is_left: bool = False
    """whether its step was left before the update"""

    @property
    def is_step(self) -> bool:
        return self.routed is not None and self.routed.route.is_step and self.error is None

    @property
    def is_end(self) -> bool:
        return self.routed is None and self.error is None

    @property
    def is_untrained(self) -> bool:
        """Whether it was pulled and is not at fault, but no step has applied it."""
        is_open = self.applied is None or self.applied.is_masked
        return is_open and not (self.is_raised or self.is_refused or self.is_skipped)
