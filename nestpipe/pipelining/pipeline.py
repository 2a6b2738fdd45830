"""The loop over steps and micro-batches, for users' own loops and for the Trainer."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nestpipe.checkpoint import SaveOptions, Saver, Subject, load
from nestpipe.data.batch import Batch
from nestpipe.data.dataset import BatchReader
from nestpipe.distributed import World
from nestpipe.embedding.batch_copy import copied_source
from nestpipe.embedding.batch_rows import BatchRows
from nestpipe.embedding.exchange import make_exchange
from nestpipe.embedding.group import group_features
from nestpipe.embedding.memory import memory_on
from nestpipe.embedding.replica_store import with_replicas
from nestpipe.embedding.resident import Residence
from nestpipe.embedding.row_pool import RowPool
from nestpipe.embedding.table import Feature, make_store, tables_of
from nestpipe.pipelining import light
from nestpipe.pipelining.batch_state import BatchState
from nestpipe.pipelining.commit import LATE_STEPS, NonFiniteError, late_error
from nestpipe.pipelining.executor import Action, Executor
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.replicas import compare_replicas
from nestpipe.pipelining.schedule import CROSSING, LAST_STAGE, OVERLAPPING, WITHOUT_EXCHANGE
from nestpipe.pipelining.setup import can_cross, check_combinable, make_budget, operations_of, pool_of
from nestpipe.pipelining.stages import Stages
from nestpipe.pipelining.stale import StaleStages
from nestpipe.pipelining.step import Step
from nestpipe.pipelining.trace import Trace
from nestpipe.pipelining.turns import Turns, quick_switches
from nestpipe.store import NUM_BUCKETS, Store


class Pipeline:
    """An iterable of steps over batches, and a context manager that ends it cleanly.

    When it has ended, the store holds every row, whatever the schedule.
    """

    def __init__(
        self,
        features: Mapping[str, Feature],
        batches: Iterable[Batch],
        *,
        store: Store | None = None,
        world: World | None = None,
        steps: int | None = None,
        first_step: int = 0,
        trace: Trace | None = None,
        light_stages: light.LightStages | None = None,
        pool: RowPool | None = None,
        **options: Any,
    ) -> None:
        """light_stages: measurements of an earlier pipeline. pool: resident rows of an earlier pipeline on the same
        store. options: the fields of PipelineOptions."""
        self.options = PipelineOptions(**options)
        self.world = World.given_or_found(world)
        self.groups = group_features(features, pools_at_owner=self.world.size > 1)
        self.tables = tables_of(features)
        seed, num_threads = self.options.seed, self.options.num_threads
        self.store = store if store is not None else make_store(self.tables, seed, num_threads)
        """Store that holds the rows; pass it to the next pipeline to continue with them."""
        self.trace = trace or Trace(device=self.world.device, nvtx=self.options.nvtx)
        self.num_skipped = 0
        """Batches of weight 0, which do not count as steps."""
        self.num_applied = 0
        """Steps applied so far."""
        self.losses: list[float] = []
        """Losses of the steps so far; on a device, those read back so far."""
        self.partially_updated = False
        """True if an update of rows failed halfway. This rank's rows belong to no step: continue from a checkpoint."""
        self.untrained: list[Batch | Exception] = []
        """After the end: batches that were pulled and not trained, for the next pipeline, and errors of reading that no
        step has raised."""
        if not isinstance(batches, BatchReader):
            batches = BatchReader(copied_source(iter(batches), batches, features, self.world.device, num_threads))
        self._reader = batches
        self._saver = Saver()
        self._num_skipped_before = 0
        self.pool = pool
        """Rows that stay resident between batches, and between pipelines; None if the schedule keeps none."""
        self._make_stages(steps, light_stages or light.LightStages(light.LIGHT_SECONDS))
        self._first_step = self._number = first_step
        self.failed_step: int | None = None
        """On a device: first step that was masked, once the host knows."""
        self._step: Step | None = None
        self._is_stopped = False
        self.is_stop_agreed = False
        """True once a rank's request to stop has ended the loop, at the same batch on all ranks."""
        self.num_saves_written = 0
        """Saves that were on disk on every rank when the batch that the loop is at was routed."""

    def _make_stages(self, steps: int | None, light_stages: light.LightStages) -> None:
        world, options = self.world, self.options
        check_combinable(world, options, self.groups)
        memory = memory_on(world.device, is_staged=world.rows.is_staged)
        exchange = make_exchange(world.route, world.rows, world.gradients, memory, options.codecs, world.hosts)
        schedule = options.schedule
        if exchange.size == 1:
            schedule = WITHOUT_EXCHANGE.get(schedule, schedule)
        self.crosses_batches = schedule in CROSSING and can_cross(world, options)
        """Whether rows and gradients are exchanged across batches."""
        self.budget = make_budget(world, options, schedule, memory, self.crosses_batches)
        """Device memory of the embedding part; None without device_budget_bytes."""
        store = with_replicas(self.store, self.groups, world, None if self.pool is None else self.pool.store)
        residence: Residence = BatchRows(store, memory)
        if options.schedule in OVERLAPPING:
            residence = self.pool = pool_of(world, options, self.groups, store, memory, self.pool)
        else:
            self.pool = None
        kind = StaleStages if options.stale else Stages
        parts = self.groups, self._reader, store, world, exchange, memory, residence
        self.stages = kind(*parts, options, steps, self.budget, self.crosses_batches)
        self.last_stage = LAST_STAGE[schedule]
        operation_list = operations_of(world, options, self.groups, schedule, steps, self.crosses_batches)
        # In host memory nothing is uploaded, and in a world of one nothing is routed: no thread is worth its cost.
        shared = {"upload": "input"} if memory.is_host else {}
        shared |= {"route": shared.get("upload", "upload")} if exchange.size == 1 else {}
        # With a device the compute lane does no other lane's work: the device would wait for its next launch.
        alone = (None, Turns()) if world.runs_ahead else (light_stages, None)
        lanes = world.watch, world.streams, world.issuer, shared, *alone
        self.executor = Executor(operation_list, self._actions(), self.trace, *lanes)

    def _actions(self) -> dict[str, Action]:
        """Returns the action of each stage. The step itself does dense, reduce, commit and update; the executor meets
        them only in batches that are not trained."""
        stages = self.stages
        return {
            "prefetch": stages.prefetch,
            "upload": stages.upload,
            "route": stages.route,
            "retrieve": stages.retrieve,
            "send_early_rows": stages.send_early_rows,
            "begin": stages.begin,
            "send_rows": stages.send_rows,
            "return_gradients": stages.return_gradients,
            "share_sums": stages.share_sums,
            "sum_gradients": stages.sum_gradients,
            "return_late_gradients": stages.return_late_gradients,
            "late_update": stages.late_update,
            "write_back": stages.write_back,
            **dict.fromkeys(("dense", "reduce", "commit", "update"), lambda op: None),
        }

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.world.watch.report(error)  # other ranks may wait for this one
            if self._step is not None and isinstance(error, Exception):  # not after Ctrl-C
                self.stages.refuse(self._step.state)
        self.trace.enter("")
        self._end(gives_up=error is not None and self.world.size == 1)
        if self.failed_step is not None and not isinstance(error, NonFiniteError):
            late = late_error(self.failed_step)
            if error is None:
                raise self.world.watch.agreed(late)
            error.add_note(str(late))
        if self._step is not None and self._step.is_committed and not self._step.is_applied:
            rows = "were left halfway" if self.partially_updated else "have not"
            text = (
                f"step {self._step.number} was left between commit() and update_rows(): the dense "
                f"parameters may have changed, the rows {rows}; go on from a checkpoint"
            )
            if error is None:
                raise RuntimeError(text)
            error.add_note(text)

    def __iter__(self) -> Iterator[Step]:
        with quick_switches(self.world.runs_ahead):
            yield from self._steps()

    def _steps(self) -> Iterator[Step]:
        self.world.watch.check()
        self.stages.open()
        while True:
            self.world.watch.where = f"step {self._number}"
            self.trace.begin_batch(self._number)
            with self.trace.span("other"):
                state = self._next_state()
                self.poll_outcomes(self._number - LATE_STEPS)
                self._raise_late()
            if state.error is not None:
                raise self.world.watch.explained(self.stages.take_error(state), "route")
            self._read_notices(state)
            if state.is_end or self.is_stop_agreed:
                self._end()
                self._raise_late()
                return
            if not state.is_step:
                self.num_skipped += 1
                self.stages.skip(state)
                self.executor.play_through(self.last_stage)
                continue
            self._step = Step(self._number, state, self)
            yield self._step
            self.end_step()
            compare_replicas(self, state, self._number)
            if self._is_stopped:
                self._end()
                self._raise_late()
                return

    def end_step(self) -> None:
        """Ends a step after update_rows. Later work, until the next step is requested, does not count in its time."""
        step = self._step
        if step is None:
            return
        if not step.is_applied:
            raise RuntimeError(f"step {self._number} was left without update_rows(); call it after the optimizer")
        with self.trace.host_span("other"):
            self.stages.release(step.state)
            self._step = None
        self.trace.end_step(step.num_samples)
        self._number += 1

    def _read_notices(self, state: BatchState) -> None:
        """Reads what the ranks told each other with this batch."""
        if state.routed is not None:
            self.is_stop_agreed = state.routed.route.is_stop_requested
            self.num_saves_written = state.routed.route.num_saves_written

    def stop(self) -> None:
        """Ends the loop after this step.

        Call it on all ranks at the same step, once it is applied. Batches that were already pulled are `untrained`.
        To stop all ranks from one, set `world.notice.is_stop_requested` there.
        """
        self._is_stopped = True

    def flush(self) -> None:
        """Writes every row to the store, after all lanes have finished. Call it on all ranks, at a step boundary. Rows
        stay resident."""
        self.executor.drain()
        self.stages.complete_updates()
        self.stages.flush()
        self.poll_outcomes()
        self._raise_late()  # the result of a step that is not finite must not be saved or evaluated

    def save(
        self,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        lr_schedule: LRScheduler | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int = 1,
    ) -> None:
        """Writes a checkpoint of rows, dense part and position, as Trainer.save does. All ranks call it at a step
        boundary, or after the loop."""
        self.end_step()
        if self.stages.is_open:
            self.flush()
        subject = self._subject(model, optimizer, lr_schedule)
        self._saver.begin(subject, Path(path), extra or {}, SaveOptions(keep))
        self._saver.finish(waits_for_removal=True)

    def load(
        self,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        lr_schedule: LRScheduler | None = None,
    ) -> dict[str, Any]:
        """Restores what `save` wrote, with the same arguments. All ranks call it before the first step, with an empty
        store. Returns the saved `extra`.

        Data with a method `load_state` continues at the batch after the last one trained; other data is the caller's to
        move.
        """
        has_begun = self._number != self._first_step or self.stages.is_open
        if has_begun or any(self.store.sizes([t.name for t in self.tables])):
            raise RuntimeError(
                "load was called after the first step, or with rows in the store; load into a new pipeline"
            )
        subject = self._subject(model, optimizer, lr_schedule)
        try:
            loaded = load(subject, self._emptied_store, Path(path))
        except BaseException:
            self._emptied_store()
            raise
        self._first_step = self._number = loaded.num_steps
        self._num_skipped_before = loaded.num_skipped
        if loaded.data_state is not None:
            self._reader.load_state(loaded.data_state)
        return loaded.extra

    def _emptied_store(self) -> Store:
        """Returns the store, without the rows of a checkpoint that turned out to be damaged."""
        for table in self.tables:
            self.store.erase(table.name, self.store.export_piece(table.name, 0, NUM_BUCKETS).keys)
        return self.store

    def _subject(
        self, model: nn.Module | None, optimizer: Optimizer | None, lr_schedule: LRScheduler | None
    ) -> Subject:
        return Subject(
            world=self.world,
            tables=self.tables,
            store=self.store,
            seed=self.options.seed,
            num_steps=self._first_step + self.num_applied,
            num_skipped=self._num_skipped_before + self.num_skipped,
            num_micro_batches=self.options.num_micro_batches,
            data_state=self._reader.state_after(self.num_applied + self.num_skipped),
            model=model,
            optimizer=optimizer,
            lr_schedule=lr_schedule,
            recipe=None,
        )

    def poll_outcomes(self, last: int | None = None) -> None:
        """Reads the outcomes of steps that were written back, up to step `last`."""
        outcomes = self.stages.outcomes
        for number in sorted(outcomes):  # a copy: a lane may add to it meanwhile
            if self.failed_step is not None or (last is not None and number > last):
                return
            outcome = outcomes.pop(number)
            if outcome.is_masked:
                self.failed_step, self.num_applied = number, number - self._first_step
            else:
                self.losses.append(outcome.loss)

    def _raise_late(self) -> None:
        """Raises, on all ranks alike, if a step was not finite on a device."""
        if self.failed_step is not None:
            raise self.world.watch.agreed(late_error(self.failed_step))

    def _next_state(self) -> BatchState:
        op = self.executor.play_until("begin")
        self.executor.play_through("begin")
        return self.stages.state(op.batch)

    def _end(self, gives_up: bool = False) -> None:
        """Brings every row to the store and ends the threads. Does not wait for lost ranks: lanes that do end with the
        process. gives_up: for a world of one, does not wait for its reader either."""
        if self.budget is not None:
            self.budget.end()
        watch = self.world.watch
        if watch.failure is not None:
            self.partially_updated = self.stages.is_partially_updated()
            self.executor.release()
            self.stages.close()  # so that the next run reports the lost ranks, not an open writer
            return
        try:
            if gives_up:
                self._reader.stop()
                self.executor.abandon()
            else:
                self._leave_step()
                self.executor.drain()
                self.stages.complete_updates()
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C: lanes may be in collectives that can no longer complete
                watch.report(error)
            if watch.failure is not None:
                self.executor.release()
                self.stages.close()
            else:
                self._settle()
            raise
        self._settle()

    def _settle(self) -> None:
        self.partially_updated = self.stages.is_partially_updated()
        try:
            if self.partially_updated:
                self.stages.forget()
            else:
                self.stages.end()
        finally:
            self.stages.close()
        self.poll_outcomes()
        self.executor.close()
        self.untrained = self.stages.untrained()
        self.world.finish_device()  # the next run may reuse the memory of this one
        self.stages.free()
        self.trace.settle()

    def _leave_step(self) -> None:
        """Completes the exchanges of a step that was left: ranks may have left it at different micro-batches."""
        if self._step is not None and not self._step.is_applied:
            self.stages.leave(self._step.state)
            self.executor.play_until("update")
            self.world.leave()


pipeline = Pipeline
