"""Processes that read batches ahead, so that reading does not take Python's lock from the process that trains.

Each batch comes back as one piece of shared memory, and a description of the tensors in it.
"""

import io
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nestpipe.data.batch import Batch

if TYPE_CHECKING:
    from nestpipe.data.dataset import Dataset

BATCHES_AHEAD = 2
"""Batches that each process reads before they are needed."""
_ALIGNMENT = 16

Slice = tuple[int, int]
"""First sample of a batch, and the number of its samples."""


class WorkerReader(Iterator[Batch]):
    """Slices of a dataset, in order, read by several processes. Each has a copy of the dataset."""

    def __init__(self, dataset: "Dataset", slices: Iterator[Slice], num_workers: int) -> None:
        _check_picklable(dataset)
        context = multiprocessing.get_context("forkserver")  # a fork would copy locks that other threads hold
        context.set_forkserver_preload([__name__])
        _start_server()
        loader = DataLoader(
            _PackedSlices(dataset),
            sampler=_Slices(slices),
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=BATCHES_AHEAD,
            collate_fn=_unchanged,
            worker_init_fn=_begin_worker,
            multiprocessing_context=context,
            generator=torch.Generator(),  # the default one belongs to the model
        )
        self._packed = iter(loader)

    def __next__(self) -> Batch:
        try:
            packed: Packed | Exception = next(self._packed)
        except (RuntimeError, OSError, EOFError) as error:  # it was killed, perhaps because memory has run out
            raise RuntimeError(
                f"a process that reads batches has ended: {error}. Set data.num_workers (num_workers of Batches) to a "
                "smaller number, or to 0 to read in the process that trains"
            ) from error
        if isinstance(packed, Exception):
            raise packed
        return packed.unpack()


def _start_server() -> None:
    """Starts the process that forks the workers. It must live as long as they do, so it blocks SIGTERM: a signal to the
    process group is for the process that trains, which then stops in order."""
    resource_tracker.ensure_running()  # the server's start would start it, which unblocks SIGTERM
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _begin_worker(number: int) -> None:
    os.setpgid(0, 0)  # see _start_server
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when the one that trains has died: torch only watches the server, which lives as long as its
    workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Slices:
    """See DataLoader's `sampler`."""

    def __init__(self, slices: Iterator[Slice]) -> None:
        self._slices = slices

    def __iter__(self) -> Iterator[Slice]:
        return self._slices


class _PackedSlices(torch.utils.data.Dataset["Packed | Exception"]):
    def __init__(self, dataset: "Dataset") -> None:
        self._dataset = dataset

    def __getitem__(self, samples: Slice) -> "Packed | Exception":
        try:
            return Packed.of(self._dataset.samples(*samples))
        except Exception as error:  # raised when it is the batch's turn, as if this process had not been there
            return _transferable(error)


def _unchanged(value: object) -> object:
    return value


def _check_picklable(dataset: "Dataset") -> None:
    try:
        pickle.dumps(dataset)
    except Exception as error:
        raise ValueError(
            f"{type(dataset).__name__} cannot be copied to other processes: {error}. Make it picklable, or read in the "
            "process that trains, with num_workers = 0"
        ) from error


def _transferable(error: Exception) -> Exception:
    """Returns an error that another process can raise."""
    error.add_note(f"in a process that reads batches:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@dataclass(frozen=True)
class Packed:
    """A batch in one piece of memory."""

    memory: Tensor
    """Bytes of all tensors."""
    description: bytes
    """The batch, pickled with places in `memory` instead of tensors."""

    @staticmethod
    def of(batch: Batch) -> "Packed":
        text = io.BytesIO()
        pickler = _Pickler(text)
        pickler.dump(batch)
        try:
            shared = torch.UntypedStorage._new_shared(pickler.num_bytes, device="cpu")
        except RuntimeError as error:
            raise MemoryError(
                f"there is no shared memory for a batch of {pickler.num_bytes} bytes: {error}. Make /dev/shm larger, "
                "or read in the process that trains, with data.num_workers = 0 (num_workers of Batches)"
            ) from error
        memory = torch.empty(0, dtype=torch.uint8).set_(shared)
        for place, tensor in pickler.tensors.values():
            place.view(memory).copy_(tensor)
        return Packed(memory, text.getvalue())

    def unpack(self) -> Batch:
        """Returns the batch, whose tensors are views of the memory."""
        batch: Batch = _Unpickler(io.BytesIO(self.description), self.memory).load()
        return batch


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in memory."""

    first: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.first : self.first + self.num_bytes].view(self.dtype).view(self.shape)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, tuple[_Place, Tensor]] = {}
        """By identity: features may share a tensor."""
        self.num_bytes = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self.tensors:
            place = _Place(self.num_bytes, value.nbytes, value.dtype, tuple(value.shape))
            self.tensors[id(value)] = place, value
            self.num_bytes += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        place, _ = self.tensors[id(value)]
        return place.first, place.num_bytes, str(place.dtype).removeprefix("torch."), place.shape


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self._memory = memory
        self._tensors: dict[tuple[object, ...], Tensor] = {}

    def persistent_load(self, place: Any) -> Any:
        if place not in self._tensors:
            first, num_bytes, dtype, shape = place
            self._tensors[place] = _Place(first, num_bytes, getattr(torch, dtype), shape).view(self._memory)
        return self._tensors[place]
