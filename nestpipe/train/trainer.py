"""The Trainer, a thin layer on the pipeline's loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.checkpoint import DamagedCheckpoint, LeftHalfwayError, LoadReport, SaveOptions, Saver, Subject, load
from nestpipe.data.batch import Batch
from nestpipe.data.dataset import BatchReader, BatchSource
from nestpipe.device.numerics import autocast
from nestpipe.distributed.world import World
from nestpipe.embedding.batch_copy import copied_source
from nestpipe.embedding.row_pool import RowPool
from nestpipe.embedding.table import Feature, make_store, tables_of
from nestpipe.pipelining import light
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import WINDOWED
from nestpipe.pipelining.step import Step
from nestpipe.pipelining.trace import Trace
from nestpipe.store import HostStore, Store
from nestpipe.train.check_split import SplitCheck
from nestpipe.train.clip import clip_gradients
from nestpipe.train.digest import digest
from nestpipe.train.fit_result import Callback, FitResult
from nestpipe.train.loss import loss_sums, weighted_mean
from nestpipe.train.model import check_device, compiled_model
from nestpipe.train.places import Places, choose_places, has_auto, with_places
from nestpipe.train.reducer import DenseReducer
from nestpipe.train.tables_io import export_embedding, import_rows

TRACED_STEPS = 1000
"""Steps whose spans are kept by default, at about 30 spans per step and rank."""

_UNMEASURED = nullcontext()

DenseOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


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
        new_store: Callable[[int], Store] = HostStore,
        **options: Any,
    ) -> None:
        """world: by default torchrun's ranks, or else a world of one; on the accelerator if there is one.

        autocast: dtype in which the dense model computes where torch deems it safe; rows and row state keep theirs.
        compiled: whether the dense model runs by torch.compile(dynamic=True). new_store: makes the store of the rows,
        given its number of threads. options: fields of PipelineOptions, such as schedule and num_micro_batches.
        """
        self.options = PipelineOptions(**options)
        self.model = model
        self.features, self.tables = dict(features), tables_of(features)
        self._given_features, self.places = self.features, Places()
        self.world = World.given_or_found(world)
        check_device(model, self.world.device)
        self.autocast = autocast
        self._forward = compiled_model(model) if compiled else model
        self.optimizer, self.reducer = dense_optimizer(model.parameters()), DenseReducer(model, self.world)
        self.clip_norm = clip_norm
        """Largest joint norm of the global batch's dense gradients."""
        self.clip_rows = clip_rows
        """Whether row gradients count in that norm and are scaled with the others. Then none may be late."""
        self.lr_schedule = schedule_lr(self.optimizer) if schedule_lr is not None else None
        """Schedule of the dense learning rate; it advances once per step."""
        self.check_split = check_split
        """Whether fit refuses a model whose loss sums depend on how the batch is cut."""
        self.recipe: str | None = None
        """Text of the recipe, saved with the model."""
        self._loaded_data_state: Mapping[str, Any] | None = None
        self.saver = Saver()
        """Saves of this trainer, and the one under way."""
        self.load_report = LoadReport()
        """What the last load has taken from its checkpoint, made new and dropped."""
        self.load_problems: tuple[str, ...] = ()
        """What was wrong with newer checkpoints, which the last load has passed over."""
        self._damaged: tuple[DamagedCheckpoint, ...] = ()
        self.num_steps = 0
        self.num_skipped = 0
        """Batches of weight 0 so far. They do not count as steps, but the data advances."""
        self.new_store = new_store
        self.store = self.empty_store()
        self.pool: RowPool | None = None
        """Rows that stay resident between batches and between calls of fit; None before the first one."""
        self._pipeline: Pipeline | None = None
        self._source: BatchSource | None = None
        self.is_partially_updated = False
        """Whether some dense parameters or rows have the update of a step and others do not."""
        self._light_stages = light.LightStages(light.LIGHT_SECONDS)
        self._overlaps_reduction = self.options.schedule in WINDOWED

    def empty_store(self) -> Store:
        """Returns a new store with this trainer's tables."""
        return make_store(self.tables, self.seed, self.options.num_threads, self.new_store)

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
        """Trains until the data ends on all ranks, `steps` more steps are done, or a callback ends it.

        `after_step` receives the result so far, on the ranks that pass it. Callbacks must be the same on all ranks;
        they may evaluate and save. Pass the result of an earlier call as `result` to extend it.
        """
        self._refuse_within_fit("fit")
        self._check_usable()
        self._check_same_start()
        result = result if result is not None else FitResult()
        self.choose_places(source := self.source_of(batches))
        if self.check_split:
            split = self.options.num_micro_batches, self.options.clustering
            check = SplitCheck(self.model, self.features, self.store, *split, warns=self.world.rank == 0)
            with self.world.watch.doing("the split check"):
                result.forward_flops_per_sample = check.first_batch(source, steps)
        num_steps_before, num_skipped_before, reader = self.num_steps, self.num_skipped, BatchReader(source)
        self._pipeline = pipeline = Pipeline(
            self.features,
            reader,
            store=self.store,
            world=self.world,
            steps=steps,
            first_step=self.num_steps,
            trace=self._trace(result),
            light_stages=self._light_stages,
            pool=self.pool,
            **self.pipeline_options(),
        )
        self.pool = pipeline.pool
        try:
            with pipeline:
                for step in pipeline:
                    self._train(step)
                    self._record_progress(pipeline, result, num_steps_before, num_skipped_before)
                    source.advance_to(pipeline.num_applied + pipeline.num_skipped)
                    if self.saver.is_written(pipeline.num_saves_written):
                        pipeline.end_step()
                        self.saver.finish()
                    if due := [callback for callback in callbacks if self.num_steps % callback.every == 0]:
                        pipeline.end_step()
                        if self._is_stopped_by(due, result):
                            pipeline.stop()
                    if after_step is not None:
                        with pipeline.trace.span("other"), self.world.watch.doing("after_step"):
                            after_step(result)
            self.saver.finish()
        finally:
            self._pipeline = None
            result.is_stop_requested |= pipeline.is_stop_agreed
            # A device reports a failed step late: the dense parameters have its update by then, no row has.
            self.is_partially_updated |= pipeline.partially_updated or pipeline.failed_step is not None
            self._record_progress(pipeline, result, num_steps_before, num_skipped_before)
            result.num_skipped += pipeline.num_skipped
            result.add_memory(pipeline.budget)
            source.advance_to(reader.num_pulled - len(pipeline.untrained))  # a failed batch is not retried
            source.give_back(pipeline.untrained)
        return result

    def choose_places(self, source: BatchSource) -> None:
        """Chooses the places of features and tables that are "auto" (train/places.py). All ranks call it; fit does."""
        if has_auto(self.features) and self.world.size > 1:
            chosen = choose_places(self.features, source, self.world, self.options).items()
            places = {kind: {**self.places.get(kind, {}), **names} for kind, names in chosen}
            self._set_places(places, with_places(self._given_features, places))

    def _set_places(self, places: Places, features: dict[str, Feature]) -> None:
        self.places, self.features, self.tables = places, features, tables_of(features)

    def pipeline_options(self) -> dict[str, Any]:
        """Returns the options of a fit. A norm over rows needs every gradient before the update."""
        return vars(self.options) | ({"late_gradients": False} if self.clip_norm is not None and self.clip_rows else {})

    def _record_progress(
        self, pipeline: Pipeline, result: FitResult, num_steps_before: int, num_skipped_before: int
    ) -> None:
        """Moves the pipeline's losses to the result and updates the counts of steps and skipped batches."""
        result.losses.extend(pipeline.losses)
        pipeline.losses.clear()
        self.num_steps = num_steps_before + pipeline.num_applied
        self.num_skipped = num_skipped_before + pipeline.num_skipped

    def _trace(self, result: FitResult) -> Trace:
        if result.spans is not None and result.traced_steps is None:
            result.traced_steps = range(self.num_steps, self.num_steps + TRACED_STEPS)
        spans = result.spans, self.num_steps, self.world.device, result.traced_steps
        return Trace(result.times, *spans, nvtx=self.options.nvtx, work=result.work)

    def _is_stopped_by(self, due: Sequence[Callback], result: FitResult) -> bool:
        """Returns whether a callback ends the training on any rank: all ranks must leave the loop at the same step."""
        with self.world.watch.doing("callbacks"):
            answers = [callback(self, result) for callback in due]
        num_stops = torch.tensor([int(any(answers))])
        self.world.control.all_reduce_sum(num_stops)
        result.is_stopped = bool(num_stops.any())
        return result.is_stopped

    def flush(self) -> None:
        """Writes every row to the store. All ranks call it within fit, at a step boundary; fit does it at its end."""
        self._check_usable()
        if self._pipeline is not None:
            self._pipeline.flush()
        elif self.pool is not None:
            self.pool.flush()

    def source_of(self, batches: Iterable[Batch]) -> BatchSource:
        """Returns the source of the batches. An earlier fit's iterator keeps batches pulled but not trained."""
        iterator = iter(batches)
        if self._source is None or self._source.batches is not iterator:
            where = self.world.device, self.options.num_threads
            self._source = copied_source(iterator, batches, self.features, *where)
        return self._source

    def data_state(self) -> Mapping[str, Any] | None:
        """Returns where the data continues after the batches trained so far, for `load_state` of the data.

        The pipeline pulls batches ahead of training, so within `fit` the data's own `state()` is ahead of this one.
        Returns None for data without a method `state()`.
        """
        return self._source.state if self._source is not None else self._loaded_data_state

    def _refuse_within_fit(self, what: str) -> None:
        """Raises within fit, where rows in the pipeline would hide and overwrite new ones."""
        if self._pipeline is not None:
            remedy = "call it between two calls of fit. A callback that returns True ends the call it is in"
            raise RuntimeError(f"{what} was called within fit; {remedy}")

    def _check_usable(self) -> None:
        if self.is_partially_updated:
            raise RuntimeError(
                "a step was left halfway: some dense parameters or rows have its update and others do not. Load a "
                "checkpoint to go on"
            )

    def _check_same_start(self) -> None:
        """Refuses ranks whose dense parts differ: they would silently stay different."""
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

    def save(
        self,
        path: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        replaces_newer: bool = False,
        keep: int = 1,
        complete_every: int = 1,
    ) -> None:
        """Writes a checkpoint into a folder of checkpoints, then removes older ones but the last `keep`. All ranks call
        it, within fit at a step boundary.

        The folder must be new, empty, or one of checkpoints already. A checkpoint of more steps than this trainer's is
        not replaced unless `replaces_newer` is set. `extra` is saved with the model; `load` returns it. With `wait`
        False, training may go on while the checkpoint is written: fit, the next save or `finish_save` completes it, and
        raises if it has failed. complete_every: 10, for example, lets nine of ten saves in a row write only what has
        changed since the one before.
        """
        self.flush()
        options = SaveOptions(keep, complete_every, replaces_newer, self._damaged)
        self.saver.begin(self._subject(), Path(path), extra or {}, options)
        if wait:
            self.saver.finish(waits_for_removal=True)

    def finish_save(self) -> None:
        """Completes a save that was begun with wait=False. All ranks call it."""
        self.saver.finish(waits_for_removal=True)

    def load(self, path: str | Path, *, strict: bool = True) -> dict[str, Any]:
        """Restores what `save` wrote, for an exact continuation at the same world size; another one has the same rows.
        Returns the saved `extra`.

        Of a folder with several checkpoints, the newest good one is taken; `load_problems` says what is wrong with
        newer ones. `data_state()` then returns where the data continues. strict: False takes what still fits into a
        changed model; `load_report` says what. A load that fails leaves this trainer as it was.
        """
        self._refuse_within_fit("load")
        self.saver.finish()
        try:
            loaded = load(self._subject(), self.empty_store, Path(path), strict)
        except LeftHalfwayError:
            self.is_partially_updated = True
            raise
        features = with_places(self._given_features, loaded.places)
        self.store, self.pool, self._source = loaded.store, None, None
        self._set_places(loaded.places, features)
        self.num_steps, self.num_skipped = loaded.num_steps, loaded.num_skipped
        self._loaded_data_state = loaded.data_state
        self.load_report, self.load_problems, self._damaged = loaded.report, loaded.problems, loaded.damaged
        self.is_partially_updated = False
        return loaded.extra

    def _subject(self) -> Subject:
        return Subject(
            world=self.world,
            tables=self.tables,
            store=self.store,
            seed=self.seed,
            num_steps=self.num_steps,
            num_skipped=self.num_skipped,
            num_micro_batches=self.options.num_micro_batches,
            data_state=self.data_state(),
            model=self.model,
            optimizer=self.optimizer,
            lr_schedule=self.lr_schedule,
            recipe=self.recipe,
            places=self.places,
        )

    def export_embedding(self, table: str) -> tuple[Tensor, nn.Embedding]:
        """Returns the keys of a table, ascending, and their rows as plain torch, on every rank."""
        self.flush()
        return export_embedding(self, table)

    def import_rows(self, table: str, keys: Tensor, rows: Tensor) -> None:
        """Writes pretrained rows. Every rank passes the same rows and keeps those it owns."""
        self._check_usable()
        self._refuse_within_fit("import_rows")
        self.flush()
        import_rows(self, table, keys, rows)

    def digest(self) -> str:
        """Returns a hash of all rows, row state, dense parameters and dense optimizer state; the same on every rank."""
        self.flush()
        return digest(self.tables, self.store, self.num_steps, self.world, self.model, self.optimizer)

    def split_into(self, num_micro_batches: int) -> None:
        """Sets the number of micro-batches for the next fit. All ranks call it with the same number."""
        self._refuse_within_fit("split_into")
        self.options = replace(self.options, num_micro_batches=num_micro_batches)

    def _train(self, step: Step) -> None:
        self.compute_gradients(step)
        scale = clip_gradients(step, self.reducer, self.clip_norm, self.clip_rows)
        try:
            self.optimizer.step()
            if self.lr_schedule is not None:
                self.lr_schedule.step()
            step.update_rows(scale if self.clip_rows else 1.0)
        except BaseException:
            self.is_partially_updated = not step.is_applied
            raise

    def compute_gradients(self, step: Step, forward: AbstractContextManager[object] = _UNMEASURED) -> None:
        """Computes the gradients of a step, and sums the dense ones over ranks. Changes no parameter and no row.

        forward: a context for each forward, of which it measures the time, for example.
        """
        with step.trace.span("dense"):
            self.model.train()
            self.model.zero_grad()  # includes parameters that the optimizer does not have
        losses: list[Tensor] = []
        for micro_batch in step:
            with self.world.watch.doing("forward and backward"):  # may compile, at any step
                with forward, self.precision():
                    sums = loss_sums(self._forward(micro_batch.embeddings, micro_batch.inputs), step.weights)
                loss = weighted_mean(sums, step.weights)
                with self.reducer.overlap(micro_batch.is_last and self._overlaps_reduction), step.backward():
                    loss.backward()
            losses.append(loss.detach())
        with step.trace.span("dense"):
            total = torch.stack(losses or [torch.zeros((), device=self.world.device)]).double().sum()
        self.reducer.finish(step, total)

    def precision(self) -> AbstractContextManager[object]:
        """Returns the context for a forward of the model."""
        return nullcontext() if self.autocast is None else autocast(self.world.device, self.autocast)
