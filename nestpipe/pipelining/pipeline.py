"""The loop over steps and micro-batches, for a user's own loop and for the Trainer alike."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

import torch

from nestpipe.data.batch import Batch
from nestpipe.data.cluster import BY_KEYS, Clustering
from nestpipe.data.dataset import BatchReader, BatchSource
from nestpipe.device.streams import finish_all, is_accelerator
from nestpipe.distributed import Lane, World
from nestpipe.embedding.device_memory import DeviceMemory
from nestpipe.embedding.plan import WINDOWS
from nestpipe.embedding.table import Feature, Table, tables_of
from nestpipe.pipelining.executor import Action, Executor
from nestpipe.pipelining.finite import LATE_STEPS, NonFiniteError, found_late
from nestpipe.pipelining.schedule import LAST_STAGE, OVERLAPPING, SCHEDULES, WINDOWED, WITHOUT_EXCHANGE, operations
from nestpipe.pipelining.stages import FAULTS, Flight, Stages
from nestpipe.pipelining.step import Step
from nestpipe.pipelining.trace import Trace
from nestpipe.store import HostStore


class Pipeline:
    """An iterable of steps over batches, and the context that ends it cleanly.

    When it has ended, the store holds every row, whatever the schedule.
    """

    def __init__(
        self,
        features: Mapping[str, Feature],
        batches: Iterable[Batch],
        *,
        store: HostStore | None = None,
        world: World | None = None,
        schedule: str = "nested",
        num_micro_batches: int = 1,
        clustering: Clustering = BY_KEYS,
        window: str = "once",
        steps: int | None = None,
        first_step: int = 0,
        seed: int = 0,
        num_threads: int = 1,
        device_budget_bytes: int | None = None,
        trace: Trace | None = None,
        stale: bool = False,
        fault: str = "none",
    ) -> None:
        """device_budget_bytes: what the embedding part may take of the device, on each rank; a batch that needs more is
        refused, see docs/memory.md. `stale` and `fault` are for experiments and tests: they make the result wrong."""
        _check_choice("schedule", schedule, SCHEDULES)
        _check_choice("window", window, WINDOWS)
        _check_choice("fault", fault, FAULTS)
        if num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {num_micro_batches}, must be at least 1")
        if (stale or fault != "none") and schedule not in OVERLAPPING:
            raise ValueError(f"stale rows and faults need one of the schedules {', '.join(OVERLAPPING)}")
        self.features = dict(features)
        self.store = store if store is not None else make_store(tables_of(features), seed, num_threads)
        """holds the rows; give it to the next pipeline to go on with them"""
        self.world = World.given_or_found(world)
        if self.world.size == 1:
            schedule = WITHOUT_EXCHANGE.get(schedule, schedule)
        self.seed = seed
        self.trace = trace or Trace(device=self.world.device)
        self.num_skipped = 0
        """batches of weight 0, which are no step"""
        self.num_applied = 0
        """steps"""
        self.is_masked = torch.zeros((), dtype=torch.bool, device=self.world.device)
        """of a device: whether a step had a loss or gradient that is not finite; then it and later ones do not count"""
        self.losses: list[float] = []
        """of a device: of the steps that the host has heard of, in order"""
        self.is_torn = False
        """whether an update of rows failed halfway: this rank's rows are of no step, go on from a checkpoint"""
        self.untrained: list[Batch | Exception] = []
        """after the end: what was pulled and not trained, for the next pipeline; an error that no step has raised yet,
        too"""
        self.memory = self._device_memory(device_budget_bytes, schedule)
        """what the embedding part needs of the device, if it has a budget"""
        self._reader = batches if isinstance(batches, BatchReader) else BatchReader(BatchSource(iter(batches)))
        self.stages = Stages(
            self.features,
            self._reader,
            self.store,
            self.world,
            num_micro_batches=num_micro_batches,
            clustering=clustering,
            window=window,
            num_threads=num_threads,
            steps=steps,
            keeps_overlap=schedule in OVERLAPPING,
            stale=stale,
            fault=fault,
            memory=self.memory,
        )
        actions: dict[str, Action] = {
            "prefetch": self.stages.prefetch,
            "upload": self.stages.upload,
            "route": self.stages.route,
            "retrieve": self.stages.retrieve,
            "begin": self.stages.begin,
            "bring": self.stages.bring,
            "take": self.stages.take,
            "overlap_sync": self.stages.overlap_sync,
            "write_back": self.stages.write_back,
            **dict.fromkeys(("dense", "reduce", "update"), lambda op: None),  # of a batch that is no step
        }
        listed, world = operations(schedule, num_micro_batches, steps), self.world
        self.last_stage = LAST_STAGE[schedule]
        self.executor = Executor(listed, actions, self.trace, world.watch, world.streams, world.issuer)
        self._first_step = self._number = first_step
        self.failed_step: int | None = None
        """of a device: the first one that is masked, once the host has heard of it"""
        self._step: Step | None = None
        self._is_stopped = False

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.world.watch.report(error)  # other ranks may not know of it, and would wait for this one
            if self._step is not None and isinstance(error, Exception):  # not if somebody pressed Ctrl-C
                self._step.refuse_batch()
        self.trace.enter("")
        self._end(gives_up=error is not None and self.world.size == 1)
        if self.failed_step is not None and not isinstance(error, NonFiniteError):
            late = found_late(self.failed_step)
            if error is None:
                raise self.world.watch.agreed(late)
            error.add_note(str(late))
        if self._step is not None and self._step.is_reduced and not self._step.is_applied:
            rows = "were left halfway" if self.is_torn else "have not"
            text = (
                f"step {self._step.number} was left between the dense reduction and update_rows(): the dense "
                f"parameters may have changed, the rows {rows}; go on from a checkpoint"
            )
            if error is None:
                raise RuntimeError(text)
            error.add_note(text)

    def __iter__(self) -> Iterator[Step]:
        self.stages.open()
        while True:
            self.world.watch.where = f"step {self._number}"
            self.trace.begin_batch(self._number)
            flight = self._next_flight()
            self._hear(self._number - LATE_STEPS)
            self._raise_late()
            if flight.error is not None:
                flight.is_raised = True
                raise self.world.watch.explained(flight.error, "route")
            if flight.is_end:
                self._end()
                self._raise_late()
                return
            if not flight.is_step:
                self.num_skipped += 1
                flight.is_skipped = True
                self.executor.play_through(self.last_stage)
                continue
            self._step = Step(self._number, flight, self)
            yield self._step
            self.end_step()
            if self._is_stopped:
                self._end()
                self._raise_late()
                return

    def end_step(self) -> None:
        """After update_rows: what follows, until the next step is asked for, does not count in the step's time."""
        step = self._step
        if step is None:
            return
        if not step.is_applied:
            raise RuntimeError(f"step {self._number} was left without update_rows(); call it after the optimizer")
        with self.trace.span("other"):
            self._step = step._flight.window = None  # frees what the window held
        self.trace.end_step(step.num_samples)
        self._number += 1

    def stop(self) -> None:
        """On all ranks, at the same step, once it is applied: the loop ends after it, as if no more had been asked for.
        Batches that were pulled already are `untrained`."""
        self._is_stopped = True

    def flush(self) -> None:
        """At a step boundary, on all ranks: lets the lanes finish, and writes every row to the store. Then goes on."""
        self.executor.drain()
        self.stages.flush()
        self._hear()
        self._raise_late()  # nobody is to save, or to evaluate, what a step that is not finite has left

    def _hear(self, last: int | None = None) -> None:
        """What the device has found out about the steps that were written back, up to this one."""
        heard = self.stages.heard
        for number in sorted(heard):  # a copy: a lane may add to it meanwhile
            if self.failed_step is not None or (last is not None and number > last):
                return
            loss, is_masked = heard.pop(number)
            if is_masked:
                self.failed_step, self.num_applied = number, number - self._first_step
            else:
                self.losses.append(loss)

    def _raise_late(self) -> None:
        """On all ranks alike: what a device found out about a step."""
        if self.failed_step is not None:
            raise self.world.watch.agreed(found_late(self.failed_step))

    def _next_flight(self) -> Flight:
        op = self.executor.play_until("begin")
        self.executor.play_through("begin")
        return self.stages.flight(op.batch)

    def _end(self, gives_up: bool = False) -> None:
        """The store holds every row; threads end. Ranks that no longer answer are not waited for: their lanes end with
        the process. A rank alone that gives up does not wait for its reader, either."""
        if self.memory is not None:
            self.memory.end()
        watch = self.world.watch
        if watch.failure is not None:
            self.executor.release()
            self.stages.close()  # so that the next run names the lost ranks, not this one
            return
        try:
            if gives_up:
                self._reader.stop()
                self.executor.abandon()
            else:
                self._leave_step()
                self.executor.drain()
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C: lanes may be in collectives that cannot end any more
                watch.report(error)
            if watch.failure is not None:
                self.executor.release()
                self.stages.close()
            else:
                self._settle()
            raise
        self._settle()

    def _settle(self) -> None:
        self.is_torn = self.stages.is_torn()
        try:
            if not self.is_torn:
                self.stages.flush()
        finally:
            self.stages.close()
        self._hear()
        self.executor.close()
        self.untrained = self.stages.untrained()
        self._finish_device()  # the next run may get the memory of this one
        self.trace.settle()

    def _finish_device(self) -> None:
        device = self.world.device
        if self.world.size == 1 or not is_accelerator(device):
            finish_all(device)
        else:  # the device may be in a collective that a lost rank never joins
            lane = Lane("device")
            self.world.watch.wait(lane.submit(lambda: finish_all(device)), "the end of the run")
            lane.close()

    def _device_memory(self, budget_bytes: int | None, schedule: str) -> DeviceMemory | None:
        if budget_bytes is None:
            return None
        lanes = {"is_windowed": schedule in WINDOWED, "is_overlapping": schedule in OVERLAPPING}
        lanes["is_staged"] = self.world.rows.is_staged
        return DeviceMemory(budget_bytes, self.world.rank, self.world.device, **lanes)

    def _leave_step(self) -> None:
        """Ranks may have left a step at different micro-batches: each goes through with what others may wait for."""
        if self._step is not None and not self._step.is_applied:
            self.executor.play_until("update")
            self.world.leave()


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, choices))}")


pipeline = Pipeline


def make_store(tables: Sequence[Table], seed: int, num_threads: int) -> HostStore:
    """A store with these tables, empty."""
    store = HostStore(num_threads)
    for table in tables:
        store.create_table(table.spec(seed))
    return store
