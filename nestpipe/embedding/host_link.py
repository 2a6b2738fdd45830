"""The link between a device and the host store: records travel both ways through pinned host memory.

They are copied a stretch at a time. While one stretch travels, the host store works on another one, and the two
directions of the link are used at once. On the device a kernel copies records between a stretch and their slots.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from nestpipe.device.streams import Mark, Streams, is_accelerator, mark, wait_for
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import host_empty
from nestpipe.embedding.memory import HostCall, Swap
from nestpipe.kernels.rows import copy as row_kernels

P = ParamSpec("P")
R = TypeVar("R")

STRETCH_BYTES = 64 << 20
"""Bytes of records that are copied at a time: enough work for all threads of the host store."""

_FIRST_SHARE = 4
"""The first stretch of a swap is so many times smaller: nothing is copied before its slots are known."""


class HostLink:
    """Copies records between slots on a device and the host store, in the order of the calling thread's stream."""

    def __init__(self, device: torch.device) -> None:
        self._incoming = _Incoming(device)
        self._outgoing = _Outgoing(device)
        self._beside = ThreadPoolExecutor(1, "nestpipe-slots")

    def fill(self, records: Tensor, slots: Tensor | None, gather: HostCall) -> None:
        """See Memory.fill_records."""
        for k, stretch in enumerate(_stretches(records, len(records if slots is None else slots))):
            gathered = self._incoming.gather(k, stretch, records, gather)
            self._incoming.copy(k, gathered, records, stretch if slots is None else slots[stretch])

    def drain(self, records: Tensor, slots: Tensor | None, scatter: HostCall) -> None:
        """See Memory.drain_records."""
        stretches = _stretches(records, len(records if slots is None else slots))
        self._outgoing.begin()
        for k in range(-1, len(stretches)):
            if k + 1 < len(stretches):  # travels while the host store works on the one before
                self._outgoing.copy(k + 1, records, stretches[k + 1] if slots is None else slots[stretches[k + 1]])
            if k >= 0:
                self._outgoing.scatter(k, stretches[k], scatter)

    def swap(self, records: Tensor, swap: Swap) -> None:
        """See Memory.swap_records. Another thread sees to the slots, while this one gathers and scatters."""
        stretches = _stretches(records, swap.num_arriving, _FIRST_SHARE)
        self._outgoing.begin()
        submit = self._beside.submit if len(stretches) > 1 else _at_once  # waking a thread takes a tenth of a ms
        assigned, filled = [submit(swap.assign, stretch) for stretch in stretches[:2]], list[Future[None]]()
        try:
            for k, stretch in enumerate(stretches):
                is_late = not assigned[k].done()
                if is_late:  # then records that leave are copied after others are gathered, instead of meanwhile
                    gathered = self._incoming.gather(k, stretch, records, swap.gather)
                part = assigned[k].result()
                assigned += [submit(swap.assign, following) for following in stretches[k + 2 : k + 3]]
                has_leaving = len(part.leaving) > 0
                if has_leaving:
                    self._outgoing.copy(k, records, part.leaving)
                if not is_late:
                    gathered = self._incoming.gather(k, stretch, records, swap.gather)
                if has_leaving:
                    self._outgoing.scatter(k, slice(0, len(part.leaving)), part.scatter)
                self._incoming.copy(k, gathered, records, part.arriving)
                filled.append(submit(part.fill))
        finally:
            wait(assigned)  # nothing goes on behind the caller
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

    def copy(self, k: int, gathered: Tensor, records: Tensor, slots: Tensor | slice) -> None:
        """Begins to copy stretch k to its slots."""
        if isinstance(slots, slice):
            records[slots].copy_(gathered, non_blocking=True)
        else:
            arrived = gathered.to(records.device, non_blocking=True)
            embedding_memory.add(arrived)
            row_kernels.copy_rows(arrived, None, records, _uploaded(slots, records.device))
        self._memory[k % 2].done = mark(records.device)


class _Outgoing:
    """Records on their way to the host store, in a stream of their own: the other direction goes on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = _Stretch(device), _Stretch(device)
        self._copied = [torch.empty(0), torch.empty(0)]
        self._streams = Streams(device)
        self._begun: Mark = None

    def begin(self) -> None:
        """Notes that all records that will leave have been written by work that the calling thread's stream waits for.
        Later work of that stream, such as copies in the other direction, is not waited for."""
        self._begun = mark(self._device)

    def copy(self, k: int, records: Tensor, slots: Tensor | slice) -> None:
        """Begins to copy stretch k from its slots."""
        memory, num_records = self._memory[k % 2], _length(slots)
        copied = self._copied[k % 2] = memory.records(num_records, records)
        with self._streams.on_lane("out"):
            wait_for(self._begun)
            if isinstance(slots, slice):
                source = records[slots]
            else:
                source = torch.empty_like(copied, device=self._device)
                embedding_memory.add(source)
                row_kernels.copy_rows(records, _uploaded(slots, self._device), source, None)
            copied.copy_(source, non_blocking=True)
            memory.done = mark(self._device)

    def scatter(self, k: int, stretch: slice, scatter: HostCall) -> None:
        """Writes stretch k to the host store."""
        self._memory[k % 2].wait()
        scatter(self._copied[k % 2], stretch, None)


def _stretches(records: Tensor, number: int, first_share: int = 1) -> list[slice]:
    """Returns stretches of so many records. first_share: if one is not enough, the first is so many times smaller."""
    per_stretch = max(1, STRETCH_BYTES // (records.shape[1] * records.itemsize))
    first = min(number, per_stretch if number <= per_stretch else max(1, per_stretch // first_share))
    bounds = [0, *range(first, number, per_stretch), number] if number > 0 else []
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def _length(slots: Tensor | slice) -> int:
    return slots.stop - slots.start if isinstance(slots, slice) else len(slots)


def _uploaded(slots: Tensor, device: torch.device) -> Tensor:
    if is_accelerator(device) and not slots.is_pinned():
        slots = host_empty((len(slots),), slots.dtype, device).copy_(slots)
    return slots.to(device, non_blocking=True)


def _at_once(call: Callable[P, R], *arguments: P.args, **names: P.kwargs) -> Future[R]:
    """Stands for `submit` of an executor, without a thread."""
    done: Future[R] = Future()
    done.set_result(call(*arguments, **names))
    return done
