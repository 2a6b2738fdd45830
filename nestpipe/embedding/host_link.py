"""The link between a device and the host store: records travel both ways through pinned host memory.

They are copied a stretch at a time. While one stretch travels, the host store works on another one, and the two
directions of the link are used at once. On the device a kernel copies records between a stretch and their slots.
"""

import torch
from torch import Tensor

from nestpipe.device.streams import Mark, Streams, is_accelerator, mark, use_here, wait_for
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import host_empty
from nestpipe.embedding.memory import HostCall
from nestpipe.kernels.rows import copy as row_kernels

STRETCH_BYTES = 64 << 20
"""Bytes of records that are copied at a time: enough work for all threads of the host store."""


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


class HostLink:
    """Copies records between slots on a device and the host store, in the order of the calling thread's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = Streams(device)
        # While one stretch travels, the host store works on the other.
        self._outgoing = _Stretch(device), _Stretch(device)
        self._incoming = _Stretch(device), _Stretch(device)

    def swap(
        self, records: Tensor, leaving: Tensor | None, scatter: HostCall, arriving: Tensor | None, gather: HostCall
    ) -> None:
        """See Memory.swap_records. None stands for all slots of `records`, in order."""
        num_out, num_in = (len(records if slots is None else slots) for slots in (leaving, arriving))
        per_stretch = max(1, STRETCH_BYTES // (records.shape[1] * records.itemsize))
        out = None if leaving is None else self._uploaded(leaving)
        into = None if arriving is None else self._uploaded(arriving)
        begun = mark(self._device)  # records may still be written by work that this stream waits for
        out_stretches, in_stretches = _stretches(num_out, per_stretch), _stretches(num_in, per_stretch)
        copied = [self._copy_out(records, out, stretch, 0, begun) for stretch in out_stretches[:1]]
        for k in range(max(len(out_stretches), len(in_stretches))):
            # The next stretch travels while the host store works on this one.
            copied += [self._copy_out(records, out, stretch, k + 1, begun) for stretch in out_stretches[k + 1 : k + 2]]
            if k < len(in_stretches):
                filled = self._filled(records, in_stretches[k], k, gather)
            if k < len(out_stretches):
                self._outgoing[k % 2].wait()
                scatter(copied[k], out_stretches[k], None)
            if k < len(in_stretches):
                self._copy_in(records, into, in_stretches[k], filled)
                self._incoming[k % 2].done = mark(self._device)

    def _filled(self, records: Tensor, stretch: slice, k: int, gather: HostCall) -> Tensor:
        """Returns the records of stretch k from the host store, in pinned memory."""
        self._incoming[k % 2].wait()
        filled = self._incoming[k % 2].records(stretch.stop - stretch.start, records)
        gather(filled, stretch, None)
        return filled

    def _copy_out(self, records: Tensor, slots: Tensor | None, stretch: slice, k: int, begun: Mark) -> Tensor:
        """Begins to copy stretch k to the host, in a stream of its own: the other direction goes on meanwhile."""
        outgoing = self._outgoing[k % 2]
        copied = outgoing.records(stretch.stop - stretch.start, records)
        with self._streams.on_lane("out"):
            wait_for(begun)
            if slots is None:
                source = records[stretch]
            else:
                use_here(slots)
                source = torch.empty_like(copied, device=self._device)
                embedding_memory.add(source)
                row_kernels.copy_rows(records, slots[stretch], source, None)
            copied.copy_(source, non_blocking=True)
            outgoing.done = mark(self._device)
        return copied

    def _copy_in(self, records: Tensor, slots: Tensor | None, stretch: slice, filled: Tensor) -> None:
        if slots is None:
            records[stretch].copy_(filled, non_blocking=True)
        else:
            arrived = filled.to(self._device, non_blocking=True)
            embedding_memory.add(arrived)
            row_kernels.copy_rows(arrived, None, records, slots[stretch])

    def _uploaded(self, slots: Tensor) -> Tensor:
        if is_accelerator(self._device) and not slots.is_pinned():
            slots = host_empty((len(slots),), slots.dtype, self._device).copy_(slots)
        return slots.to(self._device, non_blocking=True)


def _stretches(number: int, per_stretch: int) -> list[slice]:
    return [slice(first, min(first + per_stretch, number)) for first in range(0, number, per_stretch)]
