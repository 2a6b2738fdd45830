"""One step of training: its micro-batches, then the update of its rows."""

import weakref
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator
from nestpipe.device.tally import embedding_memory
from nestpipe.embedding.buffer import update_rows
from nestpipe.embedding.embeddings import Embeddings
from nestpipe.pipelining.finite import are_finite, finite, squared_norm
from nestpipe.pipelining.stages import Flight

if TYPE_CHECKING:
    from nestpipe.pipelining.pipeline import Pipeline


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
                    world = self._pipeline.world
                    seed_generators(world.device, self._pipeline.seed, self.number, world.rank, i)
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
        embedding_memory.add(*self._flight.gradients[micro_batch].values())
        for leaf in leaves.values():
            leaf.grad = None
            self._handed_over.append(weakref.ref(leaf))

    def judge(self, loss: Tensor, is_unsound: Tensor) -> None:
        """On a device, where nobody waits for it: the loss of the step, and whether anything in it is not finite. From
        the first such step on, no step changes a row; the pipeline raises NonFiniteError two steps later."""
        self._pipeline.is_masked = self._pipeline.is_masked | is_unsound
        self._flight.report = torch.stack([loss.double(), self._pipeline.is_masked.double()])

    def update_rows(self, gradient_scale: float | Tensor = 1.0) -> None:
        """Row optimizer and overlap sync; write-back follows. Call it once, after the dense optimizer's step."""
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
            is_masked = self._pipeline.is_masked if is_accelerator(self._pipeline.world.device) else None
            update_rows(self.buffers, gradients, self.number + 1, is_masked)
            self._flight.step = self.number
            self._flight.is_torn = False
        self.is_applied = True
        self._pipeline.num_applied += 1
        self.trace.enter("other")
        self._pipeline.executor.step_over()
        self._pipeline.executor.play_through(self._pipeline.last_stage)
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
        return all(are_finite(gradient) for gradient in self.gradients())

    def finite_gradients(self) -> list[Tensor]:
        """The same on a device, where nobody waits for it: a bool for each table."""
        known = zip(self._gradients, self._window.are_finite(), strict=True)
        return [is_finite if is_finite is not None else finite(g) for g, is_finite in known if g is not None]

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


def seed_generators(device: torch.device, *purpose: int) -> None:
    """The default generators, which the model's dropout draws from, from (seed, step, rank, micro-batch).

    As torch.manual_seed does, which however remembers every call, with its traceback, for each kind of device that is
    not there.
    """
    seed = zlib.crc32(repr(purpose).encode())
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        of_device = torch.get_device_module(device)
        if hasattr(of_device, "default_generators"):
            of_device.default_generators[device.index].manual_seed(seed)
        else:
            of_device.manual_seed(seed)
