"""One step of training: its micro-batches, then the update of its rows."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.device.generators import seed_generators
from nestpipe.device.numerics import squared_norm
from nestpipe.device.streams import use_here
from nestpipe.distributed import RankError
from nestpipe.embedding.exchange import BatchExchange
from nestpipe.embedding.features import Embeddings
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.pipelining.batch_state import BatchState
from nestpipe.pipelining.commit import Agreement, Ballot, begin_commit

if TYPE_CHECKING:
    from nestpipe.pipelining.pipeline import Pipeline


@dataclass(frozen=True)
class MicroBatch:
    """Input of the model: embeddings, and the batch's other inputs."""

    embeddings: Embeddings
    inputs: Mapping[str, Tensor]
    model_rows: list[ModelRows]
    num_samples: int
    is_last: bool
    """True for the last micro-batch of this rank in the step."""

    @property
    def rows(self) -> list[Tensor]:
        """Returns the distinct rows by table group, then the partial sums of features that are pooled at the owner;
        backward sets their gradients."""
        return [group.tensor for group in self.model_rows]


class Step:
    """One step: iterate over its micro-batches, then call update_rows. Empty micro-batches are skipped."""

    def __init__(self, number: int, state: BatchState, pipeline: "Pipeline") -> None:
        assert state.routed is not None
        self.number = number
        self.weights = state.routed.route.weights
        self.num_samples = state.routed.route.num_samples
        self.trace = pipeline.trace
        self.is_committed = False
        """True once all ranks have agreed that the step counts."""
        self.is_applied = False
        self.state = state
        """State of its batch; read only."""
        self._batch = state.routed.route.batch
        self._pipeline = pipeline
        self._num_done = 0
        self._is_begun = False
        self._handed_over: list[weakref.ref[Tensor]] = []
        self._loss: Tensor | None = None

    @property
    def weight(self) -> float:
        """Returns the weight of the global batch, for a model with one loss."""
        if set(self.weights) - {""}:
            raise ValueError(f"this step has several weights, {sorted(self.weights)}; use step.weights[name]")
        return self.weights.get("", 0.0)

    def __iter__(self) -> Iterator[MicroBatch]:
        if self._is_begun:
            raise RuntimeError(f"step {self.number}: its micro-batches can be iterated over only once")
        self._is_begun = True
        executor, num_samples = self._pipeline.executor, self._batch.num_samples
        trained = [i for i, num in enumerate(num_samples) if num > 0]
        for i, num in enumerate(num_samples):
            with self.trace.host_span("other"):  # handing work to lanes
                op = executor.play_until("dense")
            executor.wait(op)
            began = self.trace.work.begin()
            with self.trace.passing_span("dense", i):
                rows = self._pipeline.stages.rows(self.state, i)
                if num > 0:
                    yield self._micro_batch(i, rows, is_last=i == trained[-1])
                self._pipeline.stages.collect_gradients(self.state, i, rows)
                self._handed_over += [weakref.ref(group.variable) for group in rows]
                del rows
            if not self._pipeline.world.runs_ahead:  # there, this thread only launches
                self.trace.work.end("dense", op.batch, began)
            self._num_done += 1
            executor.step_over()
        op = executor.play_until("reduce")
        try:
            executor.wait(op)
        except RankError as error:
            if self._pipeline.crosses_batches:
                error.add_note(
                    "with exchange across batches a step waits until the next batch was read; if yours depends on the "
                    "result of the step before it, set exchange.cross_batch (cross_batch of the pipeline) to false"
                )
            raise
        executor.step_over()

    def _micro_batch(self, number: int, rows: list[ModelRows], is_last: bool) -> MicroBatch:
        world, batch = self._pipeline.world, self._batch
        seed_generators(world.device, self._pipeline.options.seed, self.number, world.rank, number)
        embeddings = Embeddings(self._pipeline.groups, batch.groups, number, rows, batch.bags)
        return MicroBatch(embeddings, batch.inputs[number], rows, batch.num_samples[number], is_last)

    def backward(self) -> AbstractContextManager[None]:
        """Returns a context for a backward, in which this thread does not need Python's lock. Lanes use it then, and
        so delay the model less on an accelerator. Nothing else depends on it."""
        return self._pipeline.executor.turns.backward()

    def commit(self, loss: Tensor | None = None) -> None:
        """Makes all ranks agree whether the step counts. Call it once, after the last backward and before the dense
        optimizer's step; DenseReducer.finish does so. Sums `loss` over ranks, in place.

        Raises on every rank if the step must not be applied on any of them: NonFiniteError if the loss or a gradient of
        the step's rows is not finite, ValueError if a table has no room (RankError on the other
        ranks).
        """
        false = torch.zeros((), dtype=torch.bool, device=self._pipeline.world.device)
        self.finish_commit(self.begin_commit(loss, false), false, loss)

    def begin_commit(self, loss: Tensor | None, non_finite: Tensor, extra: Tensor | None = None) -> Agreement:
        """Begins the agreement, for a reducer. non_finite: True if the reducer found a value that is not finite. extra:
        more numbers to sum over ranks."""
        if self.is_committed:
            raise RuntimeError(f"step {self.number}: commit was called twice")
        self.check_complete()
        self._pipeline.executor.play_until("commit")
        state, world = self.state, self._pipeline.world
        assert state.resident is not None
        part = loss.detach() if loss is not None else torch.zeros((), dtype=torch.float64, device=world.device)
        use_here(self._exchange.exceeds)
        any_non_finite = non_finite | (self._exchange.exceeds[0] != 0) | ~part.isfinite()
        numbers = extra if extra is not None else torch.empty(0, dtype=torch.float64)
        with self.trace.span("commit"):
            return begin_commit(world, Ballot(self.number, any_non_finite, part, state.resident.problem, numbers))

    def finish_commit(self, agreement: Agreement, any_non_finite: Tensor, loss: Tensor | None = None) -> Tensor:
        """Ends the agreement, for a reducer. Returns the summed `extra`; raises if the step does not count."""
        with self.trace.span("commit"):
            total, extra, non_finite = agreement.finish(any_non_finite)
        if self._pipeline.world.runs_ahead:
            self._pipeline.stages.record_outcome(self.state, total, non_finite)
        if loss is not None:
            self._loss = loss.detach().copy_(total)
        self.is_committed = True
        self._pipeline.executor.step_over()
        return extra

    def update_rows(self, gradient_scale: float | Tensor = 1.0) -> None:
        """Applies the row optimizer. Call it once, after the dense optimizer's step."""
        if self.is_applied:
            raise RuntimeError(f"step {self.number}: update_rows was called twice")
        if not self.is_committed:
            self.commit()
        self.check_complete()
        pipeline = self._pipeline
        pipeline.executor.play_until("update")
        with self.trace.passing_span("update"):
            is_masked = pipeline.stages.is_masked if pipeline.world.runs_ahead else None
            pipeline.stages.update(self.state, self.number, gradient_scale, is_masked)
        self.is_applied = True
        pipeline.num_applied += 1
        if self._loss is not None and not pipeline.world.runs_ahead:
            pipeline.losses.append(float(self._loss))
        self.trace.enter("other")
        pipeline.executor.step_over()
        if pipeline.last_stage != "update":
            pipeline.executor.play_through(pipeline.last_stage)
        self._count_bytes()

    def check_complete(self) -> None:
        """Raises if some micro-batches of the step were not trained."""
        num_micro_batches = self._batch.num_micro_batches
        if self._num_done < num_micro_batches:
            raise RuntimeError(
                f"step {self.number}: only {self._num_done} of {num_micro_batches} micro-batches were gone through; "
                "loop over all of them before the step is applied"
            )
        handed_over = (reference() for reference in self._handed_over)
        if any(rows is not None and rows.grad is not None for rows in handed_over):
            raise RuntimeError(
                f"step {self.number}: a backward reached the rows of a micro-batch after the loop had gone on to the "
                "next; call backward for each micro-batch within its turn of the loop"
            )

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of the rows this rank owns and trains, by table group, over the global batch. Call it
        between commit and update_rows."""
        if not self.is_committed:
            raise RuntimeError(f"step {self.number}: call commit before gradients")
        if self._exchange.has_late_gradients:
            raise RuntimeError(
                f"step {self.number}: gradients of some rows arrive during the next step; pass late_gradients=False to "
                "the pipeline or the Trainer to have all of them before the update"
            )
        assert self.state.training is not None
        if not self.state.training.sums:
            self._pipeline.executor.play_through("sum_gradients")
        return [gradients.values for gradients in self.state.training.sums if gradients is not None]

    def squared_gradient_norm(self) -> Tensor:
        """Returns the squared norm of `gradients()`, to be summed over ranks. A row that several ranks have counts
        once."""
        world, gradients = self._pipeline.world, self.gradients()
        return squared_norm(gradients if world.mesh.replica == 0 else (), world.device)

    @property
    def _exchange(self) -> BatchExchange:
        assert self.state.training is not None
        assert self.state.training.exchange is not None
        return self.state.training.exchange

    @property
    def row_bytes(self) -> int:
        return self._exchange.row_bytes

    @property
    def gradient_bytes(self) -> int:
        return self._exchange.gradient_bytes

    def _count_bytes(self) -> None:
        assert self.state.routed is not None
        assert self.state.resident is not None
        resident = self.state.resident.batch
        self.trace.add_bytes("exchanged_row_bytes_per_step", self.row_bytes)
        self.trace.add_bytes("exchanged_gradient_bytes_per_step", self.gradient_bytes)
        self.trace.add_bytes("exchanged_key_bytes_per_step", self.state.routed.route.key_bytes)
        self.trace.add_bytes("retrieved_bytes_per_step", resident.num_retrieved_bytes)
        self.trace.add_bytes("written_back_bytes_per_step", resident.num_written_bytes)
        self.trace.add_bytes("owned_keys_per_step", resident.num_keys)
        self.trace.add_bytes("retrieved_keys_per_step", resident.num_retrieved_keys)
        if self._pipeline.pool is not None:
            self.trace.add_bytes("resident_rows", self._pipeline.pool.num_rows)
            self.trace.add_bytes("resident_bytes", self._pipeline.pool.num_bytes)
