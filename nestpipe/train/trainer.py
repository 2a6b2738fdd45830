"""The Trainer: a thin layer on the pipeline's loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import BatchReader, BatchSource
from nestpipe.device.precision import autocast
from nestpipe.device.reductions import squared_norm
from nestpipe.distributed.world import World
from nestpipe.embedding.budget import DeviceBytes
from nestpipe.embedding.table import Feature, tables_of
from nestpipe.pipelining import light
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.pipeline import Pipeline, make_store
from nestpipe.pipelining.schedule import WINDOWED
from nestpipe.pipelining.step import Step
from nestpipe.pipelining.step_times import StepLog, StepTimes
from nestpipe.pipelining.trace import Span, Trace
from nestpipe.train.check_split import SplitCheck
from nestpipe.train.checkpoint import load, save
from nestpipe.train.digest import digest
from nestpipe.train.loss import loss_sums
from nestpipe.train.reducer import DenseReducer
from nestpipe.train.tables_io import export_embedding, import_rows

TRACED_STEPS = 1000
"""steps whose spans are kept unless others are named: some 30 spans a step and rank"""

DenseOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class FitResult:
    num_steps_before: int = 0
    """steps of the run before those of this result"""
    losses: list[float] = field(default_factory=list)
    """of each step: the global batch's loss sums, each divided by its weight, added up"""
    num_skipped: int = 0
    """batches of weight 0"""
    times: list[StepTimes] = field(default_factory=StepLog)
    """of the last 1,000 steps, on this rank; `times.older` has the totals of the steps before them"""
    spans: list[Span] | None = None
    """of all lanes, if a list is given to put them in"""
    traced_steps: range | None = None
    """The steps whose spans are kept; None: the first 1,000 that are trained. Batches of weight 0 count here, too."""
    validations: list[dict[str, float]] = field(default_factory=list)
    """of each validation: the step after which it was, and its numbers"""
    is_stopped: bool = False
    """whether a callback has ended the training"""
    device_bytes: DeviceBytes | None = None
    """with a budget: what the embedding part needs of the device by the formula, for the largest batch"""
    peak_device_bytes: int = 0
    """with a budget: what it did hold at most"""


class Callback(Protocol):
    """Called on all ranks, at a step boundary: rows are current, and what it does counts in no step's time.

    Work in `with trainer.world.busy()` is named in errors of ranks that wait for this one.
    """

    @property
    def every(self) -> int:
        """Steps from one call to the next."""

    def __call__(self, trainer: "Trainer", result: FitResult) -> bool:
        """True ends the training after this step, on all ranks, if any rank says so."""


class Trainer:
    """Trains a model that returns a loss sum, or a dict of them, from (embeddings, inputs)."""

    def __init__(
        self,
        model: nn.Module,
        features: Mapping[str, Feature],
        *,
        dense_optimizer: DenseOptimizer,
        world: World | None = None,
        clip_norm: float | None = None,
        clip_rows: bool = False,
        schedule_lr: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        check_split: bool = True,
        autocast: torch.dtype | None = None,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        """world: None takes the environment's: torchrun's ranks, or a world of one, on the accelerator if there is one.

        autocast: the dtype in which the dense model computes where torch deems it safe; rows and their state keep
        theirs. compiled: the dense model by torch.compile(dynamic=True). options: the fields of PipelineOptions, such
        as schedule and num_micro_batches.
        """
        self.options = PipelineOptions(**options)
        self.model = model
        self.features = dict(features)
        self.tables = tables_of(features)
        self.world = World.given_or_found(world)
        _check_device(model, self.world.device)
        self.autocast = autocast
        self._forward = torch.compile(model, dynamic=True) if compiled else model
        self.optimizer = dense_optimizer(model.parameters())
        self.reducer = DenseReducer(model, self.world)
        self.clip_norm = clip_norm
        """the largest norm of the dense gradients of the global batch, together"""
        self.clip_rows = clip_rows
        """whether the gradients of rows count in that norm, and are scaled with the others"""
        self.lr_schedule = schedule_lr(self.optimizer) if schedule_lr is not None else None
        """schedule of the dense optimizer's learning rate, advanced once a step"""
        self.check_split = check_split
        """whether fit refuses a model whose loss sums depend on how the batch is cut"""
        self.recipe: str | None = None
        """saved with the model, for those who read it"""
        self._loaded_data_state: Mapping[str, Any] | None = None
        self.num_steps = 0
        self.num_skipped = 0
        """batches of weight 0 that this object was given: they are no steps, but the data goes on"""
        self.store = make_store(self.tables, self.seed, self.options.num_threads)
        self._pipeline: Pipeline | None = None
        self._source: BatchSource | None = None
        self.is_partially_updated = False
        """whether some of the dense parameters or rows are of one step and others of the step before"""
        self._short_stages = light.LightStages(light.LIGHT_SECONDS)
        self._overlaps_reduction = self.options.schedule in WINDOWED

    @property
    def seed(self) -> int:
        return self.options.seed

    def fit(
        self,
        batches: Iterable[Batch],
        steps: int | None = None,
        after_step: Callable[[FitResult], None] | None = None,
        result: FitResult | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> FitResult:
        """Trains until the data ends on all ranks, or for `steps` more steps, or until a callback ends it.

        `after_step` sees the result so far, on the ranks that give it. Callbacks must be the same on all ranks; they
        may evaluate and save. A result of an earlier call may be given to be added to.
        """
        self._refuse_within_fit("fit")
        self._check_usable()
        self._check_same_start()
        result = result if result is not None else FitResult()
        source = self._source_of(batches)
        if self.check_split:
            split = self.options.num_micro_batches, self.options.clustering
            check = SplitCheck(self.model, self.features, self.store, *split, warns=self.world.rank == 0)
            with self.world.watch.doing("the split check"):
                check.first_batch(source, steps)
        num_before, num_skipped, reader = self.num_steps, self.num_skipped, BatchReader(source)
        self._pipeline = pipeline = Pipeline(
            self.features,
            reader,
            store=self.store,
            world=self.world,
            steps=steps,
            first_step=self.num_steps,
            trace=self._trace(result),
            short_stages=self._short_stages,
            **vars(self.options),
        )
        try:
            with pipeline:
                for step in pipeline:
                    self._train(step)
                    _move(pipeline.losses, result.losses)
                    self.num_steps = num_before + pipeline.num_applied
                    self.num_skipped = num_skipped + pipeline.num_skipped
                    source.advance_to(pipeline.num_applied + pipeline.num_skipped)
                    if due := [callback for callback in callbacks if self.num_steps % callback.every == 0]:
                        pipeline.end_step()
                        if self._is_stopped_by(due, result):
                            pipeline.stop()
                    if after_step is not None:
                        with pipeline.trace.span("other"), self.world.watch.doing("after_step"):
                            after_step(result)
        finally:
            self._pipeline = None
            # What a device finds out late has gone into the dense parameters by then, and into no row.
            self.is_partially_updated |= pipeline.partially_updated or pipeline.failed_step is not None
            self.num_steps = num_before + pipeline.num_applied
            self.num_skipped = num_skipped + pipeline.num_skipped
            _move(pipeline.losses, result.losses)
            result.num_skipped += pipeline.num_skipped
            _add_memory(result, pipeline)
            source.advance_to(reader.num_pulled - len(pipeline.untrained))  # a batch that failed does not come again
            source.give_back(pipeline.untrained)
        return result

    def _trace(self, result: FitResult) -> Trace:
        if result.spans is not None and result.traced_steps is None:
            result.traced_steps = range(self.num_steps, self.num_steps + TRACED_STEPS)
        return Trace(result.times, result.spans, self.num_steps, self.world.device, result.traced_steps)

    def _is_stopped_by(self, due: Sequence[Callback], result: FitResult) -> bool:
        """Whether one of them, on any rank, ends the training: all ranks must leave the loop at the same step."""
        with self.world.watch.doing("callbacks"):
            answers = [callback(self, result) for callback in due]
        num_stops = torch.tensor([int(any(answers))])
        self.world.control.all_reduce_sum(num_stops)
        result.is_stopped = bool(num_stops.any())
        return result.is_stopped

    def flush(self) -> None:
        """Within fit, at a step boundary, on all ranks: every row is written to the store. Otherwise nothing to do."""
        self._check_usable()
        if self._pipeline is not None:
            self._pipeline.flush()

    def _source_of(self, batches: Iterable[Batch]) -> BatchSource:
        """If an earlier call of fit was given the same iterator: with what it pulled and did not train."""
        iterator = iter(batches)
        if self._source is None or self._source.batches is not iterator:
            self._source = BatchSource(iterator, batches)
        return self._source

    def data_state(self) -> Mapping[str, Any] | None:
        """Where the data goes on after the batches trained so far: for `load_state` of the data.

        The pipeline pulls batches ahead of training, so within `fit` the data's own `state()` is ahead of this one.
        Returns None for data without a method `state()`.
        """
        return self._source.state if self._source is not None else self._loaded_data_state

    def _refuse_within_fit(self, what: str) -> None:
        """Rows that are under way would hide the new ones, and overwrite them."""
        if self._pipeline is not None:
            raise RuntimeError(
                f"{what} was called within fit; call it between two calls of fit. A callback that returns True ends "
                "the call it is in"
            )

    def _check_usable(self) -> None:
        if self.is_partially_updated:
            raise RuntimeError(
                "a step was left halfway: some dense parameters or rows have its update and others do not. Load a "
                "checkpoint to go on"
            )

    def _check_same_start(self) -> None:
        """Ranks whose dense parts differ would go on to differ, without a sign of it."""
        if self.num_steps > 0 or self.world.size == 1:
            return
        texts = self.world.control.share_text(digest((), self.store, 0, World(), self.model))
        if len(set(texts)) > 1:
            raise self.world.watch.agreed(
                ValueError(
                    "the ranks' models start from different parameters or buffers; make them with the same seed on "
                    "every rank, for example torch.manual_seed(0) before the model"
                )
            )

    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None, replaces_newer: bool = False) -> None:
        """Writes a checkpoint into a folder of checkpoints, on all ranks together; older ones are then removed.

        The folder must be new, empty, or one of checkpoints already. A checkpoint of more steps than this trainer's is
        not replaced unless `replaces_newer` is set. `extra` is saved with the model; `load` returns it.
        """
        self.flush()
        save(self, Path(path), dict(extra or {}), replaces_newer)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Goes on where `save` left off, exactly, at the same world size; returns the `extra` that was saved.

        `data_state()` then tells where the data goes on. A load that fails leaves this trainer as it was.
        """
        self._refuse_within_fit("load")
        loaded = load(self, Path(path))
        self.store, self.num_steps = loaded.store, loaded.num_steps
        self._source, self._loaded_data_state = None, loaded.data_state
        self.is_partially_updated = False
        return loaded.extra

    def export_embedding(self, table: str) -> tuple[Tensor, nn.Embedding]:
        """The keys of a table, ascending, and their rows as plain torch; on every rank."""
        self.flush()
        return export_embedding(self, table)

    def import_rows(self, table: str, keys: Tensor, rows: Tensor) -> None:
        """Pretrained rows, the same on every rank; each keeps those it owns."""
        self._check_usable()
        self._refuse_within_fit("import_rows")
        import_rows(self, table, keys, rows)

    def digest(self) -> str:
        """One number for all rows, row state, dense parameters and dense optimizer state; the same on every rank."""
        self.flush()
        return digest(self.tables, self.store, self.num_steps, self.world, self.model, self.optimizer)

    def _train(self, step: Step) -> None:
        with step.trace.span("dense"):
            self.model.train()
            self.model.zero_grad()  # of parameters that the optimizer does not have, too
        losses: list[Tensor] = []
        for micro_batch in step:
            with self.world.watch.doing("forward and backward"):  # it may be compiled in there, at any step
                with self.precision():
                    sums = loss_sums(self._forward(micro_batch.embeddings, micro_batch.inputs), step.weights)
                loss = _sum([_divided(value, step.weights[name]) for name, value in sums.items()])
                with self.reducer.overlap(micro_batch.is_last and self._overlaps_reduction):
                    loss.backward()
            losses.append(loss.detach())
        total = torch.stack(losses or [torch.zeros((), device=self.world.device)]).double().sum()
        self.reducer.finish(step, total)
        scale = self._clip(step)
        try:
            self.optimizer.step()
            if self.lr_schedule is not None:
                self.lr_schedule.step()
            step.update_rows(scale if self.clip_rows else 1.0)
        except BaseException:
            self.is_partially_updated = not step.is_applied
            raise

    def precision(self) -> AbstractContextManager[object]:
        """Around a forward of the model."""
        if self.autocast is None:
            return nullcontext()
        return autocast(self.world.device, self.autocast)

    def _clip(self, step: Step) -> float | Tensor:
        """Scales the reduced dense gradients down to clip_norm; returns by what."""
        if self.clip_norm is None:
            return 1.0
        # Each rank has other rows; the dense gradients are the same on all.
        squared = squared_norm((), self.world.device)
        if self.clip_rows:
            squared = step.squared_gradient_norm()
            with step.trace.span("reduce"):
                self.world.dense.all_reduce_sum(squared)
        gradients = [p.grad for p in self.reducer.parameters if p.grad is not None]
        norm = (squared + squared_norm(gradients, self.world.device)).sqrt()
        scale = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return scale


def _check_device(model: nn.Module, device: torch.device) -> None:
    elsewhere = {str(p.device) for p in (*model.parameters(), *model.buffers()) if p.device != device}
    if elsewhere:
        raise ValueError(
            f"the model has parameters or buffers on {', '.join(sorted(elsewhere))}, the ranks train on {device}; call "
            f"model.to({str(device)!r}) before the Trainer is made, or World(device=...)"
        )


def _add_memory(result: FitResult, pipeline: Pipeline) -> None:
    if pipeline.budget is None:
        return
    largest = pipeline.budget.largest
    if result.device_bytes is None or largest.total > result.device_bytes.total:
        result.device_bytes = largest
    result.peak_device_bytes = max(result.peak_device_bytes, pipeline.budget.peak_bytes)


def _move(source: list[float], target: list[float]) -> None:
    target.extend(source)
    source.clear()


def _sum(losses: list[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _divided(loss_sum: Tensor, weight: float) -> Tensor:
    """A loss that nothing in the global batch weighs in is no loss."""
    return loss_sum / weight if weight > 0 else loss_sum * 0.0
