"""What a step costs if its batch is split into some number of micro-batches, and the step time that follows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nestpipe.pipelining.schedule import OVERLAPPING, Op
from nestpipe.prediction.play import play
from nestpipe.prediction.result import Result, sum_up
from nestpipe.prediction.ways import operations_of
from nestpipe.prediction.work import Times, Way, Work

PLAYED_STEPS = 12
FORWARD, BACKWARD = "forward", "backward"
"""The two parts of the stage `dense`."""
TimesOrNumber = float | Times
"""Milliseconds: one number for all ranks, or one for each."""
POOLED = ("retrieve", "write_back")
"""Stages that resident rows make shorter, in schedules that overlap batches."""


@dataclass(frozen=True)
class Line:
    """A time for a batch that grows evenly with its number of micro-batches. An array has a number for each rank."""

    unsplit_ms: TimesOrNumber
    added_ms: TimesOrNumber = 0.0
    """Added by each micro-batch after the first."""

    def at(self, num_micro_batches: int) -> TimesOrNumber:
        return self.unsplit_ms + (num_micro_batches - 1) * self.added_ms


@dataclass(frozen=True)
class ExchangeCost:
    """Time of an exchange, by its bytes."""

    latency_ms: float
    ms_per_byte: float

    def work(self, num_bytes: float) -> Work:
        return Work(0.0, True, self.latency_ms, num_bytes * self.ms_per_byte)


@dataclass(frozen=True)
class Traffic:
    """Bytes that the rank with the most of them exchanges in a batch."""

    rows: tuple[float, ...]
    """Rows that arrive with each micro-batch."""
    gradients: tuple[float, ...]
    """Gradients that leave with each micro-batch."""
    early_rows: float = 0.0
    late_gradients: float = 0.0

    @property
    def all_rows(self) -> float:
        return sum(self.rows) + self.early_rows

    @property
    def all_gradients(self) -> float:
        return sum(self.gradients) + self.late_gradients


@dataclass(frozen=True)
class SplitCosts:
    """Costs of a batch, for several numbers of micro-batches."""

    way: Way
    num_ranks: int
    has_issuer: bool
    """One thread issues all exchanges of rows."""
    stages: Mapping[str, Line]
    """Each rank's own work, by stage. Instead of `dense` there are its two parts."""
    collectives: Mapping[str, Line]
    """Work of all ranks together, by stage, apart from the exchange."""
    rows: ExchangeCost
    gradients: ExchangeCost
    traffic: Mapping[int, Traffic]
    """By number of micro-batches. These are the numbers that can be predicted."""
    measured_step_ms: Mapping[int, float] = field(default_factory=dict)
    """Steps of this way of training, by number of micro-batches."""
    hit_rate: float = 0.0
    """Share of owned keys that the batch before has, too."""
    late_share: float = 0.0
    """Share of the row update that is done during the next batch."""

    def work(self, op: Op, num_micro_batches: int) -> Work:
        """Returns the cost of an operation."""
        traffic = self.traffic[num_micro_batches]
        exchanged = {
            "send_rows": (self.rows, traffic.rows),
            "return_gradients": (self.gradients, traffic.gradients),
            "send_early_rows": (self.rows, (traffic.early_rows,)),
            "return_late_gradients": (self.gradients, (traffic.late_gradients,)),
        }
        if op.stage in exchanged:
            cost, parts = exchanged[op.stage]
            return cost.work(parts[op.micro_batch])
        if op.stage in self.collectives:
            return Work(0.0, True, float(self.collectives[op.stage].at(num_micro_batches)))
        if op.stage == "dense":
            is_optimizer = op.micro_batch < 0  # not measured: it is the same for every number
            return Work() if is_optimizer else Work(self.dense_ms(num_micro_batches) / num_micro_batches)
        return self._own_work(op.stage, num_micro_batches)

    def dense_ms(self, num_micro_batches: int) -> TimesOrNumber:
        """Returns the time of all forwards and backwards of a batch."""
        return self.stages[FORWARD].at(num_micro_batches) + self.stages[BACKWARD].at(num_micro_batches)

    def exchange_ms(self, num_micro_batches: int) -> float:
        """Returns the time of all exchanges of a batch, one after the other."""
        traffic = self.traffic[num_micro_batches]
        pairs = (self.rows, traffic.all_rows), (self.gradients, traffic.all_gradients)
        return sum(cost.latency_ms * num_micro_batches + cost.ms_per_byte * total for cost, total in pairs)

    def _own_work(self, stage: str, num_micro_batches: int) -> Work:
        own = {"late_update": "update"}.get(stage, stage)
        share = 1.0
        if own in POOLED and self.way.schedule in OVERLAPPING:
            share = 1 - self.hit_rate
        if own == "update":
            share = self.late_share if stage == "late_update" else 1 - self.late_share
        return Work(share * self.stages[own].at(num_micro_batches) if own in self.stages else 0.0)


def predict_step_ms(costs: SplitCosts, num_micro_batches: int) -> float:
    """Returns the step that follows from the costs, times what measured steps took longer than those that follow for
    them. Between two measured numbers this factor changes evenly with each doubling."""
    measured = sorted(costs.measured_step_ms)
    factors = [costs.measured_step_ms[num] / play_split(costs, num).step_ms for num in measured]
    factor = float(np.interp(np.log2(num_micro_batches), np.log2(measured), factors)) if measured else 1.0
    return factor * play_split(costs, num_micro_batches).step_ms


def play_split(costs: SplitCosts, num_micro_batches: int) -> Result:
    """Returns the step that follows from the costs, by playing the trainer's own list of operations."""
    operations = operations_of(costs.way, num_micro_batches, costs.num_ranks, costs.has_issuer)
    return sum_up(
        play(
            operations,
            lambda op: costs.work(op, num_micro_batches),
            PLAYED_STEPS,
            costs.num_ranks,
            has_issuer=costs.has_issuer,
        )
    )
