"""The loop over steps and micro-batches, for a user's own loop and for the Trainer alike."""

import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.data.cluster import BY_KEYS, Clustering
from nestpipe.data.dataset import BatchReader, BatchSource
from nestpipe.device.streams import has_streams
from nestpipe.distributed import World
from nestpipe.embedding.buffer import update_rows
from nestpipe.embedding.embeddings import Embeddings
from nestpipe.embedding.plan import WINDOWS
from nestpipe.embedding.table import Feature, Table, tables_of
from nestpipe.pipelining.executor import Action, Executor
from nestpipe.pipelining.finite import LATE_STEPS, are_finite, found_late, squared_norm
from nestpipe.pipelining.schedule import OVERLAPPING, SCHEDULES, operations
from nestpipe.pipelining.stages import FAULTS, Flight, Stages
from nestpipe.pipelining.trace import Trace
from nestpipe.store import HostStore


@dataclass(frozen=True)
class MicroBatch:
    """What the model sees: rows as embeddings, and the other inputs."""

    embeddings: Embeddings
    inputs: Mapping[str, Tensor]
    leaves: Mapping[str, Tensor]
    """by table: the distinct rows, in which the gradient arrives"""
    num_samples: int
    is_last: bool
    """the last of this rank's step"""


class Step:
    """One step: iterate over its micro-batches, then call update_rows. Empty micro-batches are passed over."""

    def __init__(self, number: int, flight: Flight, pipeline: "Pipeline") -> None:
        assert flight.route is not None
        assert flight.window is not None
        self.number = number
        self.weights = flight.route.weights
        self.num_samples = flight.route.num_samples
        self.trace = pipeline.trace
        self.is_reduced = False
        """whether the dense gradients were handed to the dense optimizer"""
        self.is_applied = False
        self.problem = flight.problem
        """why this step must not be applied; the dense reduction tells all ranks"""
        self.buffers = flight.buffers
        """the working set of this rank, as an owner"""
        self._flight = flight
        self._route = flight.route
        self._pipeline = pipeline
        self._window = flight.window
        self._num_done = 0
        self._is_begun = False
        self._handed_over: list[weakref.ref[Tensor]] = []

    @property
    def weight(self) -> float:
        """Of the global batch, for a model with one loss."""
        if set(self.weights) - {""}:
            raise ValueError(f"this step has several weights, {sorted(self.weights)}; use step.weights[name]")
        return self.weights.get("", 0.0)

    def __iter__(self) -> Iterator[MicroBatch]:
        if self._is_begun:
            raise RuntimeError(f"step {self.number}: its micro-batches can be gone through once only")
        self._is_begun = True
        request, executor = self._route.request, self._pipeline.executor
        trained = [i for i, num_samples in enumerate(request.num_samples) if num_samples > 0]
        for i, num_samples in enumerate(request.num_samples):
            executor.wait(executor.play_until("dense"))
            with self.trace.span("dense", i):
                leaves = self._window.leaves(i)
                if num_samples > 0:
                    seed_generators(self._pipeline.seed, self.number, self._pipeline.world.rank, i)
                    embeddings = Embeddings(self._pipeline.features, request.placed[i], leaves)
                    yield MicroBatch(embeddings, request.inputs[i], leaves, num_samples, is_last=i == trained[-1])
                self._hand_over(i, leaves)
                del leaves
            self._num_done += 1
            executor.step_over()
        executor.wait(executor.play_until("reduce"))
        executor.step_over()

    def _hand_over(self, micro_batch: int, leaves: Mapping[str, Tensor]) -> None:
        """The gradients, to the lane that returns them: from now on they are its own."""
        self._flight.gradients[micro_batch] = {name: leaf.grad for name, leaf in leaves.items()}
        for leaf in leaves.values():
            leaf.grad = None
            self._handed_over.append(weakref.ref(leaf))

    def judge(self, loss: Tensor, is_unsound: Tensor) -> None:
        """On a device, where nobody waits for it: the loss of the step, and whether anything in it is not finite. From
        the first such step on, no step changes a row; the pipeline raises NonFiniteError two steps later."""
        self._pipeline.is_masked = self._pipeline.is_masked | is_unsound
        self._flight.report = torch.stack([loss.double(), self._pipeline.is_masked.double()])

    def update_rows(self, gradient_scale: float | Tensor = 1.0) -> None:
        """Row optimizer, overlap sync, write-back. Call it once, after the dense optimizer's step."""
        if self.is_applied:
            raise RuntimeError(f"step {self.number}: update_rows was called twice")
        self.check_complete()
        if self.problem is not None:
            raise self.problem
        self._pipeline.executor.play_until("update")
        with self.trace.span("update"):
            gradients = self._gradients
            if isinstance(gradient_scale, Tensor) or gradient_scale != 1.0:
                gradients = [None if gradient is None else gradient * gradient_scale for gradient in gradients]
            self._flight.is_torn = True
            is_masked = self._pipeline.is_masked if has_streams(self._pipeline.world.device) else None
            update_rows(self.buffers, gradients, self.number + 1, is_masked)
            self._flight.step = self.number
            self._flight.is_torn = False
        self.is_applied = True
        self._pipeline.num_applied += 1
        self.trace.enter("")
        self._pipeline.executor.step_over()
        self._pipeline.executor.play_through("write_back")
        self._count_bytes()

    def refuse_batch(self) -> None:
        """It failed: to train it again would fail again."""
        self._flight.is_refused = True

    def check_complete(self) -> None:
        """Refuses to apply a step of which some micro-batches were not trained."""
        if self._num_done < len(self._route.request.num_samples):
            raise RuntimeError(
                f"step {self.number}: only {self._num_done} of {len(self._route.request.num_samples)} micro-batches "
                "were gone through; loop over all of them before the step is applied"
            )
        leaves = (reference() for reference in self._handed_over)
        if any(leaf is not None and leaf.grad is not None for leaf in leaves):
            raise RuntimeError(
                f"step {self.number}: a backward reached the rows of a micro-batch after the loop had gone on to the "
                "next; call backward for each micro-batch within its turn of the loop"
            )

    def gradients_are_finite(self) -> bool:
        """Of the rows this rank owns, over the global batch. Call it after the last micro-batch."""
        return all(are_finite(gradient) for gradient in self._gradients if gradient is not None)

    def gradients(self) -> list[Tensor]:
        """Of the rows this rank owns and trains, by table, over the global batch. Call it after the last one."""
        return [gradient for gradient in self._gradients if gradient is not None]

    def squared_gradient_norm(self) -> Tensor:
        """Of the rows this rank owns, over the global batch."""
        return squared_norm(self.gradients(), self._pipeline.world.device)

    @cached_property
    def _gradients(self) -> list[Tensor | None]:
        with self.trace.span("update"):
            return self._window.gradients()

    @property
    def row_bytes(self) -> int:
        return self._window.row_bytes

    @property
    def gradient_bytes(self) -> int:
        return self._window.gradient_bytes

    def _count_bytes(self) -> None:
        retrieved, written = self._pipeline.stages.host_bytes(self._flight)
        self.trace.add_bytes("exchanged_row_bytes_per_step", self.row_bytes)
        self.trace.add_bytes("exchanged_gradient_bytes_per_step", self.gradient_bytes)
        self.trace.add_bytes("exchanged_key_bytes_per_step", self._route.key_bytes)
        self.trace.add_bytes("retrieved_bytes_per_step", retrieved)
        self.trace.add_bytes("written_back_bytes_per_step", written)


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
        trace: Trace | None = None,
        stale: bool = False,
        fault: str = "none",
    ) -> None:
        """`stale` and `fault` are for experiments and tests: they make the result wrong."""
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
        self.world = world or World()
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
        listed = operations(schedule, num_micro_batches, steps)
        self.executor = Executor(listed, actions, self.trace, self.world.watch, self.world.device)
        self._number = first_step
        self._step: Step | None = None
        self._is_stopped = False

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.trace.enter("")
        if error is not None:
            self.world.watch.report(error)  # other ranks may not know of it, and would wait for this one
            if self._step is not None and isinstance(error, Exception):  # not if somebody pressed Ctrl-C
                self._step.refuse_batch()
        self._end(gives_up=error is not None and self.world.size == 1)
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
        while True:
            self.world.watch.where = f"step {self._number}"
            self.trace.begin_batch(self._number)
            flight = self._next_flight()
            self._hear(self._number - LATE_STEPS)
            if flight.error is not None:
                flight.is_raised = True
                raise self.world.watch.explained(flight.error, "route")
            if flight.is_end:
                self._end()
                self._hear(self._number)
                return
            if not flight.is_step:
                self.num_skipped += 1
                self.executor.play_through("write_back")
                continue
            self._step = Step(self._number, flight, self)
            yield self._step
            self.end_step()
            if self._is_stopped:
                self._end()
                self._hear(self._number)
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

    def _hear(self, last: int) -> None:
        """What the device has found out about the steps up to this one; by now they have been written back."""
        heard = self.stages.heard
        for number in sorted(number for number in heard if number <= last):
            loss, is_masked = heard.pop(number)
            if is_masked:
                self.num_applied -= self._number - number
                raise self.world.watch.agreed(found_late(number))
            self.losses.append(loss)

    def _next_flight(self) -> Flight:
        op = self.executor.play_until("begin")
        self.executor.play_through("begin")
        return self.stages.flight(op.batch)

    def _end(self, gives_up: bool = False) -> None:
        """The store holds every row; threads end. Ranks that no longer answer are not waited for: their lanes end with
        the process. A rank alone that gives up does not wait for its reader, either."""
        if self.world.watch.failure is not None:
            return
        try:
            if gives_up:
                self._reader.stop()
                self.executor.abandon()
            else:
                self._leave_step()
                self.executor.drain()
        finally:
            self.is_torn = self.stages.is_torn()
            if not self.is_torn:
                self.stages.flush()
            self.executor.close()
            self.trace.settle()
            self.untrained = self.stages.untrained()

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


def seed_generators(*purpose: int) -> None:
    """The default generators, which the model's dropout draws from, from (seed, step, rank, micro-batch)."""
    torch.manual_seed(zlib.crc32(repr(purpose).encode()))
