"""The link between a device and the host store: records travel both ways through pinned host memory.

They are copied a stretch at a time. While one stretch travels, the host store works on another one, and the two
directions of the link are used at once. On the device a kernel copies records between a stretch and their slots.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from nestpipe.device.streams import Mark, Streams, is_accelerator, mark, use_here, wait_for
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import host_empty
from nestpipe.embedding.memory import HostCall, Swap
from nestpipe.kernels.rows import copy as row_kernels

P = ParamSpec("P")
R = TypeVar("R")

STRETCH_BYTES = 64 << 20
"""Bytes of records that are copied at a time: enough work for all threads of the host store."""


class HostLink:
    """Copies records between slots on a device and the host store, in the order of the calling thread's stream."""

    def __init__(self, device: torch.device) -> None:
        self._incoming = _Incoming(device)
        self._outgoing = _Outgoing(device)
        self._beside = ThreadPoolExecutor(1, "nestpipe-slots")

    def fill(self, records: Tensor, slots: Tensor | None, gather: HostCall) -> None:
        """See Memory.fill_records."""
        into = None if slots is None else _uploaded(slots, records.device)
        for k, stretch in enumerate(_stretches(records, len(records if slots is None else slots))):
            gathered = self._incoming.gather(k, stretch, records, gather)
            self._incoming.copy(k, stretch, gathered, records, into)

    def drain(self, records: Tensor, slots: Tensor | None, scatter: HostCall) -> None:
        """See Memory.drain_records."""
        stretches = self._outgoing.begin(records, slots)
        for k in range(len(stretches)):
            self._outgoing.scatter(k, scatter)

    def swap(self, records: Tensor, swap: Swap) -> None:
        """See Memory.swap_records. Another thread sees to the slots, while this one gathers and scatters."""
        stretches = _stretches(records, swap.num_arriving)
        submit = self._beside.submit if len(stretches) > 1 else _at_once  # waking a thread takes a tenth of a ms
        assigned, filled = submit(swap.assign), list[Future[None]]()
        try:
            gathered = [self._incoming.gather(k, s, records, swap.gather) for k, s in enumerate(stretches[:2])]
            leaving, arriving = assigned.result()
            into, num_out = _uploaded(arriving, records.device), len(self._outgoing.begin(records, leaving))
            for k, stretch in enumerate(stretches):
                if k >= 2:
                    gathered.append(self._incoming.gather(k, stretch, records, swap.gather))
                if k < num_out:
                    self._outgoing.scatter(k, swap.scatter)
                self._incoming.copy(k, stretch, gathered[k], records, into)
                filled.append(submit(swap.fill, stretch))
        finally:
            wait([assigned])  # nothing goes on behind the caller
            wait(filled)
        for call in filled:
            call.result()


class _Stretch:
    """Pinned host memory for one stretch of records."""

    def __init__(self, device: torch.device) -> None:
        self.done: Mark = None
        """Event that fires when the device no longer uses the memory."""
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def records(self, num_records: int, like: Tensor) -> Tensor:
        """Returns memory for records like those of an array."""
        num_bytes = num_records * like.shape[1] * like.itemsize
        if self._bytes.nbytes < num_bytes:
            self._bytes = host_empty((num_bytes,), torch.uint8, self._device)
        return self._bytes[:num_bytes].view(like.dtype).view(num_records, like.shape[1])

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class _Incoming:
    """Records on their way from the host store. The host store fills one stretch while the other one travels."""

    def __init__(self, device: torch.device) -> None:
        self._memory = _Stretch(device), _Stretch(device)

    def gather(self, k: int, stretch: slice, like: Tensor, gather: HostCall) -> Tensor:
        """Returns the records of stretch k, in pinned memory."""
        memory = self._memory[k % 2]
        memory.wait()
        gathered = memory.records(stretch.stop - stretch.start, like)
        gather(gathered, stretch, None)
        return gathered

    def copy(self, k: int, stretch: slice, gathered: Tensor, records: Tensor, slots: Tensor | None) -> None:
        """Begins to copy stretch k to its slots, None for all."""
        if slots is None:
            records[stretch].copy_(gathered, non_blocking=True)
        else:
            arrived = gathered.to(records.device, non_blocking=True)
            embedding_memory.add(arrived)
            row_kernels.copy_rows(arrived, None, records, slots[stretch])
        self._memory[k % 2].done = mark(records.device)


class _Outgoing:
    """Records on their way to the host store, in a stream of their own: the other direction goes on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._memory = _Stretch(device), _Stretch(device)
        self._streams = Streams(device)
        self._copy: Callable[[int], Tensor]
        self._stretches: list[slice] = []
        self._copied: list[Tensor] = []

    def begin(self, records: Tensor, slots: Tensor | None) -> list[slice]:
        """Begins to copy slots, None for all. Returns the stretches to scatter."""
        out = None if slots is None else _uploaded(slots, records.device)
        begun = mark(records.device)  # records may still be written by work that this stream waits for
        self._stretches = _stretches(records, len(records if slots is None else slots))
        self._copy = lambda k: self._copy_stretch(k, records, out, begun)
        self._copied = [self._copy(0)] if self._stretches else []
        return self._stretches

    def scatter(self, k: int, scatter: HostCall) -> None:
        """Writes stretch k to the host store, while the next one travels."""
        if k + 1 < len(self._stretches):
            self._copied.append(self._copy(k + 1))
        self._memory[k % 2].wait()
        scatter(self._copied[k], self._stretches[k], None)

    def _copy_stretch(self, k: int, records: Tensor, slots: Tensor | None, begun: Mark) -> Tensor:
        stretch, memory = self._stretches[k], self._memory[k % 2]
        copied = memory.records(stretch.stop - stretch.start, records)
        with self._streams.on_lane("out"):
            wait_for(begun)
            if slots is None:
                source = records[stretch]
            else:
                use_here(slots)
                source = torch.empty_like(copied, device=records.device)
                embedding_memory.add(source)
                row_kernels.copy_rows(records, slots[stretch], source, None)
            copied.copy_(source, non_blocking=True)
            memory.done = mark(records.device)
        return copied


def _stretches(records: Tensor, number: int) -> list[slice]:
    per_stretch = max(1, STRETCH_BYTES // (records.shape[1] * records.itemsize))
    return [slice(first, min(first + per_stretch, number)) for first in range(0, number, per_stretch)]


def _uploaded(slots: Tensor, device: torch.device) -> Tensor:
    if is_accelerator(device) and not slots.is_pinned():
        slots = host_empty((len(slots),), slots.dtype, device).copy_(slots)
    return slots.to(device, non_blocking=True)


def _at_once(call: Callable[P, R], *arguments: P.args, **names: P.kwargs) -> Future[R]:
    """Stands for `submit` of an executor, without a thread."""
    done: Future[R] = Future()
    done.set_result(call(*arguments, **names))
    return done
