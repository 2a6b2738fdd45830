"""The Trainer: a thin layer on the pipeline's loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.data.cluster import BY_KEYS, Clustering
from nestpipe.data.dataset import BatchReader, BatchSource
from nestpipe.device.streams import has_streams
from nestpipe.distributed.world import World
from nestpipe.embedding.device_memory import DeviceBytes
from nestpipe.embedding.table import Feature, tables_of
from nestpipe.pipelining.finite import squared_norm
from nestpipe.pipelining.pipeline import Pipeline, make_store
from nestpipe.pipelining.schedule import WINDOWED
from nestpipe.pipelining.step import Step
from nestpipe.pipelining.trace import Span, StepTimes, Trace
from nestpipe.train.check_split import SplitCheck
from nestpipe.train.checkpoint import load, save
from nestpipe.train.digest import digest
from nestpipe.train.loss import loss_sums
from nestpipe.train.reducer import DenseReducer
from nestpipe.train.tables_io import export_embedding, import_rows

DenseOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class FitResult:
    losses: list[float] = field(default_factory=list)
    """of each step: the global batch's loss sums, each divided by its weight, added up"""
    num_skipped: int = 0
    """batches of weight 0"""
    times: list[StepTimes] = field(default_factory=list)
    """of each step, on this rank"""
    spans: list[Span] | None = None
    """of all lanes, if a list is given to put them in"""
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

    Long work of its own, without exchanges, goes inside `with trainer.world.busy()`.
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
        schedule: str = "nested",
        num_micro_batches: int = 1,
        clustering: Clustering = BY_KEYS,
        window: str = "once",
        clip_norm: float | None = None,
        clip_rows: bool = False,
        schedule_lr: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        check_split: bool = True,
        stale: bool = False,
        fault: str = "none",
        seed: int = 0,
        num_threads: int = 1,
        device_budget_bytes: int | None = None,
        autocast: torch.dtype | None = None,
        compiled: bool = False,
    ) -> None:
        """device_budget_bytes: what the embedding part of a rank may take of the device; a batch that needs more is
        refused, the first one before anything is trained. autocast: the dtype in which the dense model computes where
        torch deems it safe; rows and their state keep theirs. compiled: the dense model by torch.compile(dynamic=True).
        """
        self.model = model
        self.features = dict(features)
        self.tables = tables_of(features)
        self.world = world or World()
        _check_device(model, self.world.device)
        self.autocast = autocast
        self._forward = torch.compile(model, dynamic=True) if compiled else model
        self.optimizer = dense_optimizer(model.parameters())
        self.reducer = DenseReducer(model, self.world)
        self.seed = seed
        self.clip_norm = clip_norm
        """the largest norm of the dense gradients of the global batch, together"""
        self.clip_rows = clip_rows
        """whether the gradients of rows count in that norm, and are scaled with the others"""
        self.lr_schedule = schedule_lr(self.optimizer) if schedule_lr is not None else None
        """of the dense optimizer, advanced once a step"""
        self.check_split = check_split
        """whether fit refuses a model whose loss sums depend on how the batch is cut"""
        self.recipe: str | None = None
        """saved with the model, for those who read it"""
        self.data_state: Callable[[], Mapping[str, Any]] | None = None
        """gives the state of the data after the batches trained so far, to be saved with the model"""
        self.num_steps = 0
        self.num_skipped = 0
        """batches of weight 0 that this object was given: they are no steps, but the data goes on"""
        self.store = make_store(self.tables, seed, num_threads)
        self._pipeline: Pipeline | None = None
        self._source: BatchSource | None = None
        self._is_torn = False
        self._num_micro_batches = num_micro_batches
        self._clustering = clustering
        self._overlaps_reduction = schedule in WINDOWED
        self._options = {
            "schedule": schedule,
            "num_micro_batches": num_micro_batches,
            "clustering": clustering,
            "window": window,
            "seed": seed,
            "num_threads": num_threads,
            "device_budget_bytes": device_budget_bytes,
            "stale": stale,
            "fault": fault,
        }

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
        self._check_usable()
        self._check_same_start()
        result = result if result is not None else FitResult()
        source = self._source_of(iter(batches))
        if self.check_split:
            check = SplitCheck(self.model, self.features, self.store, self._num_micro_batches, self._clustering)
            with self.world.watch.doing("the split check"):
                check.first_batch(source, steps)
        num_before, num_skipped = self.num_steps, self.num_skipped
        self._pipeline = pipeline = Pipeline(
            self.features,
            BatchReader(source),
            store=self.store,
            world=self.world,
            steps=steps,
            first_step=self.num_steps,
            trace=Trace(result.times, result.spans, self.num_steps, self.world.device),
            **self._options,  # type: ignore[arg-type]
        )
        try:
            with pipeline:
                for step in pipeline:
                    loss = self._train(step)
                    if has_streams(self.world.device):
                        _move(pipeline.losses, result.losses)
                    else:
                        result.losses.append(float(loss))
                    self.num_steps = num_before + pipeline.num_applied
                    self.num_skipped = num_skipped + pipeline.num_skipped
                    if due := [callback for callback in callbacks if self.num_steps % callback.every == 0]:
                        pipeline.end_step()
                        if self._is_stopped_by(due, result):
                            pipeline.stop()
                    if after_step is not None:
                        with pipeline.trace.span("other"), self.world.watch.doing("after_step"):
                            after_step(result)
        finally:
            self._pipeline = None
            self._is_torn = pipeline.is_torn
            self.num_steps = num_before + pipeline.num_applied
            self.num_skipped = num_skipped + pipeline.num_skipped
            _move(pipeline.losses, result.losses)
            result.num_skipped += pipeline.num_skipped
            _add_memory(result, pipeline)
            source.give_back(pipeline.untrained)
        return result

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

    def _source_of(self, batches: Iterator[Batch]) -> BatchSource:
        """If an earlier call of fit was given the same iterator: with what it pulled and did not train."""
        if self._source is None or self._source.batches is not batches:
            self._source = BatchSource(batches)
        return self._source

    def _refuse_within_fit(self, what: str) -> None:
        """Rows that are under way would hide the new ones, and overwrite them."""
        if self._pipeline is not None:
            raise RuntimeError(f"{what} was called within fit; call it between two calls of fit")

    def _check_usable(self) -> None:
        if self._is_torn:
            raise RuntimeError(
                "an update of rows failed halfway: rows of this rank are of no step. Load a checkpoint to go on"
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

    def save(self, path: str | Path) -> None:
        """Writes a checkpoint, on all ranks together; the one that was there stays good until this one is complete."""
        self.flush()
        save(self, Path(path))

    def load(self, path: str | Path) -> None:
        """Goes on where `save` left off, exactly, at the same world size."""
        self._refuse_within_fit("load")
        load(self, Path(path))
        self._source, self._is_torn = None, False

    def export_embedding(self, table: str) -> tuple[Tensor, nn.Embedding]:
        """The keys of a table, ascending, and their rows as plain torch; on every rank."""
        self.flush()
        return export_embedding(self, table)

    def import_rows(self, table: str, keys: Tensor, rows: Tensor) -> None:
        """Pretrained rows, the same on every rank; each keeps those it owns."""
        self._refuse_within_fit("import_rows")
        import_rows(self, table, keys, rows)

    def digest(self) -> str:
        """One number for all rows, row state, dense parameters and dense optimizer state; the same on every rank."""
        self.flush()
        return digest(self.tables, self.store, self.num_steps, self.world, self.model, self.optimizer)

    def _train(self, step: Step) -> Tensor:
        """Returns the loss of the global batch, on the device."""
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
        self.optimizer.step()
        if self.lr_schedule is not None:
            self.lr_schedule.step()
        step.update_rows(scale if self.clip_rows else 1.0)
        return total

    def precision(self) -> AbstractContextManager[object]:
        """Around a forward of the model."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.autocast)

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
    if pipeline.memory is None:
        return
    largest = pipeline.memory.largest
    if result.device_bytes is None or largest.total > result.device_bytes.total:
        result.device_bytes = largest
    result.peak_device_bytes = max(result.peak_device_bytes, pipeline.memory.peak_bytes)


def _move(source: list[float], target: list[float]) -> None:
    target.extend(source)
    source.clear()


def _sum(losses: list[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _divided(loss_sum: Tensor, weight: float) -> Tensor:
    """A loss that nothing in the global batch weighs in is no loss."""
    return loss_sum / weight if weight > 0 else loss_sum * 0.0
