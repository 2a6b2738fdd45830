"""The loop over steps and micro-batches, for a user's own loop and for the Trainer alike."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.distributed.world import World
from nestpipe.embedding.buffer import Buffer, retrieve_rows, update_rows, write_back
from nestpipe.embedding.embeddings import Embeddings
from nestpipe.embedding.request import Request, make_request
from nestpipe.embedding.route import Route, route_keys
from nestpipe.embedding.table import Feature, Table, tables_of
from nestpipe.embedding.window import WINDOWS, Window
from nestpipe.store import HostStore

SCHEDULES = ("serial",)


@dataclass(frozen=True)
class MicroBatch:
    """What the model sees: rows as embeddings, and the other inputs."""

    embeddings: Embeddings
    inputs: Mapping[str, Tensor]
    num_samples: int
    is_last: bool
    """the last of this rank's step"""


class NonFiniteError(ArithmeticError):
    """A loss or gradient was not finite; nothing of that step was applied."""


class Step:
    """One step: iterate over its micro-batches, then call update_rows. Empty micro-batches are passed over."""

    def __init__(self, number: int, route: Route, buffers: list[Buffer], pipeline: "Pipeline") -> None:
        self.number = number
        self.weights = route.weights
        self.num_samples = route.num_samples
        self.is_applied = False
        self._route = route
        self._buffers = buffers
        self._pipeline = pipeline
        self._window = Window(route, buffers, pipeline.world, pipeline.window)

    @property
    def weight(self) -> float:
        """Of the global batch, for a model with one loss."""
        if set(self.weights) - {""}:
            raise ValueError(f"this step has several weights, {sorted(self.weights)}; use step.weights[name]")
        return self.weights.get("", 0.0)

    def __iter__(self) -> Iterator[MicroBatch]:
        request = self._route.request
        trained = [i for i, num_samples in enumerate(request.num_samples) if num_samples > 0]
        for i in range(len(request.num_samples)):
            self._window.bring(i)
            leaves: dict[str, Tensor] = {}
            if i in trained:
                leaves = self._window.leaves(i)
                seed_generators(self._pipeline.seed, self.number, self._pipeline.world.rank, i)
                embeddings = Embeddings(self._pipeline.features, request.placed[i], leaves)
                yield MicroBatch(embeddings, request.inputs[i], request.num_samples[i], i == trained[-1])
            self._window.take(i, {name: leaf.grad for name, leaf in leaves.items()})

    def update_rows(self, gradient_scale: float = 1.0) -> None:
        """Row optimizer and write-back. Call it once, after the dense optimizer's step."""
        if self.is_applied:
            raise RuntimeError(f"step {self.number}: update_rows was called twice")
        gradients = self._gradients
        if gradient_scale != 1.0:
            gradients = [None if gradient is None else gradient * gradient_scale for gradient in gradients]
        update_rows(self._buffers, gradients, self.number + 1)
        write_back(self._buffers, self._pipeline.store, self.number)
        self.is_applied = True

    def gradients_are_finite(self) -> bool:
        """Of the rows this rank owns, over the global batch. Call it after the last micro-batch."""
        return all(bool(gradient.isfinite().all()) for gradient in self._gradients if gradient is not None)

    def squared_gradient_norm(self) -> float:
        """Of the rows this rank owns, over the global batch."""
        return sum(float(gradient.double().square().sum()) for gradient in self._gradients if gradient is not None)

    @cached_property
    def _gradients(self) -> list[Tensor | None]:
        return self._window.gradients()

    @property
    def row_bytes(self) -> int:
        return self._window.row_bytes

    @property
    def gradient_bytes(self) -> int:
        return self._window.gradient_bytes


class Pipeline:
    """An iterable of steps over batches, and the context that ends it cleanly."""

    def __init__(
        self,
        features: Mapping[str, Feature],
        batches: Iterable[Batch],
        *,
        store: HostStore | None = None,
        world: World | None = None,
        schedule: str = "serial",
        num_micro_batches: int = 1,
        window: str = "once",
        steps: int | None = None,
        first_step: int = 0,
        seed: int = 0,
        num_threads: int = 1,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule is {schedule!r}, must be one of {', '.join(SCHEDULES)}")
        if window not in WINDOWS:
            raise ValueError(f"window is {window!r}, must be one of {', '.join(WINDOWS)}")
        if num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {num_micro_batches}, must be at least 1")
        self.features = dict(features)
        self.store = store if store is not None else make_store(tables_of(features), seed, num_threads)
        """holds the rows; give it to the next pipeline to go on with them"""
        self.world = world or World()
        self.window = window
        self.seed = seed
        self.num_skipped = 0
        """batches of weight 0, which are no step"""
        self._batches = iter(batches)
        self._num_micro_batches = num_micro_batches
        self._steps = steps
        self._number = first_step
        self._num_threads = num_threads

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass  # serial: nothing is ever under way between two steps

    def __iter__(self) -> Iterator[Step]:
        end = None if self._steps is None else self._number + self._steps
        num_tables = len(tables_of(self.features))
        while end is None or self._number < end:
            route = route_keys(self._next_request(), num_tables, self.world)
            if route is None:
                return
            if not route.is_step:
                self.num_skipped += 1
                continue
            step = Step(self._number, route, retrieve_rows(route, self.store), self)
            yield step
            if not step.is_applied:
                raise RuntimeError(f"step {step.number} was left without update_rows(); call it after the optimizer")
            self._number += 1

    def _next_request(self) -> Request | Exception:
        """Errors of the reader and of its batches are returned: all ranks must hear of them."""
        try:
            batch = next(self._batches, None)
            return make_request(self.features, batch, self._num_micro_batches, self.world.size, self._num_threads)
        except Exception as error:  # carried to every rank by the route's header, and raised there
            return error


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
