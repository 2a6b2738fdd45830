"""Rows in device memory: handled by kernels, and copied through pinned host memory to and from the host store.

Records have a mirror, pinned host memory of the same shape. They are copied a stretch of slots at a time, while the
host store works on the next stretch. A stretch is copied whole, including slots that were not chosen. A record begins
at a multiple of 16 bytes, which a device reads at once.

If ranks share a device, messages are in pinned host memory too. Kernels read and write them there, because copies would
queue behind those of records.
"""

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from nestpipe.device.streams import Mark, mark
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import ALIGNMENT, OfTensors, host_empty, uploaded
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.features import with_occurrences
from nestpipe.embedding.group import FeatureGroups
from nestpipe.embedding.memory import HostCall
from nestpipe.embedding.optim import RowOptimizer
from nestpipe.embedding.plan import message_unit
from nestpipe.kernels.rows import copy as row_kernels
from nestpipe.kernels.rows.pinned import keep_alive_until
from nestpipe.kernels.rows.segments import Segments, sum_segments

T = TypeVar("T", bound=OfTensors)

STRETCH_BYTES = 64 << 20
"""Bytes of records that are copied at a time: enough work for all threads of the host store."""


class DeviceMemory:
    """See Memory. Calls enqueue work in the calling thread's stream."""

    has_mirrors = True

    def __init__(self, device: torch.device, is_staged: bool) -> None:
        self.device = device
        self._is_staged = is_staged

    def empty_rows(self, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        rows = torch.empty(num_rows, dim, dtype=dtype, device=self.device)
        embedding_memory.add(rows)
        return rows

    def empty_records(self, num_slots: int, num_columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        aligned = ALIGNMENT // dtype.itemsize
        shape = (num_slots, -(-num_columns // aligned) * aligned)
        records = torch.empty(shape, dtype=dtype, device=self.device)
        mirror = host_empty(shape, dtype, self.device)
        for array in (records, mirror):
            array[:, num_columns:] = 0
        return records, mirror

    def upload(self, value: T) -> T:
        return uploaded(value, self.device)

    def upload_batch(self, features: FeatureGroups, batch: BatchDedup) -> BatchDedup:
        return uploaded(with_occurrences(features, batch), self.device)

    def fill_records(self, records: Tensor, mirror: Tensor | None, slots: Tensor | None, gather: HostCall) -> None:
        assert mirror is not None
        for stretch, chosen in _stretches(records, slots):
            gather(mirror, stretch, chosen)
            records[stretch].copy_(mirror[stretch], non_blocking=True)

    def drain_records(self, records: Tensor, mirror: Tensor | None, slots: Tensor | None, scatter: HostCall) -> None:
        assert mirror is not None
        travelling = []
        for stretch, chosen in _stretches(records, slots):
            mirror[stretch].copy_(records[stretch], non_blocking=True)
            travelling.append((mark(self.device), stretch, chosen))
        for moment, stretch, chosen in travelling:
            if moment is not None:
                moment.synchronize()
            scatter(mirror, stretch, chosen)

    def copy_rows(self, source: Tensor, from_places: Tensor | None, target: Tensor, to_places: Tensor | None) -> None:
        row_kernels.copy_rows(source, from_places, target, to_places)

    def add_rows(
        self,
        target: Tensor,
        places: Tensor | None,
        source: Tensor,
        is_first: Tensor | None,
        limit: float,
        exceeds: Tensor | None,
    ) -> None:
        row_kernels.add_rows(target, places, source, is_first, limit, exceeds)

    def check_rows(self, rows: Tensor, limit: float, exceeds: Tensor) -> None:
        if rows.numel() > 0:
            low, high = rows.aminmax()
            exceeds |= ~((low >= -limit) & (high <= limit))

    def new_flag(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    def sum_rows(self, values: Tensor, segments: Segments) -> Tensor:
        total = self.empty_rows(segments.num_segments, values.shape[1], values.dtype)
        sum_segments(values, segments, None, total)
        return total

    def update(
        self,
        optimizer: RowOptimizer,
        rows: Tensor,
        state: Tensor,
        gradient: Tensor,
        step: int,
        is_masked: Tensor | None,
    ) -> None:
        optimizer.apply(rows, state, gradient, step, is_masked)

    def empty_message(self, num_bytes: int) -> Tensor:
        if self._is_staged:
            return host_empty((num_bytes,), torch.uint8, self.device)
        message = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        embedding_memory.add(message)
        return message

    def write_message(self, source: Tensor, places: Tensor, message: Tensor, message_places: Tensor | None) -> None:
        row_kernels.copy_rows(source, places, *_in_units(message, message_places, source, len(places)))

    def read_message(
        self, message: Tensor, message_places: Tensor | None, target: Tensor, places: Tensor | None
    ) -> None:
        num_rows = len(target if places is None else places)
        row_kernels.copy_rows(*_in_units(message, message_places, target, num_rows), target, places)

    def sealed(self, message: Tensor) -> Mark:
        if not self._is_staged:
            return None
        keep_alive_until(message, self.device)  # if the step is left, nothing else waits for the kernels writing it
        return mark(self.device)

    def consumed(self, message: Tensor) -> None:
        if self._is_staged:
            keep_alive_until(message, self.device)


def _in_units(message: Tensor, places: Tensor | None, like: Tensor, num_rows: int) -> tuple[Tensor, Tensor | None]:
    """Returns a message as an array of rows like those of `like`, one at every unit, and the places in it."""
    dim, dtype = like.shape[1], like.dtype
    if places is None:
        return message[: num_rows * dim * dtype.itemsize].view(dtype).view(num_rows, dim), None
    elements = message.view(dtype)
    step = message_unit(dim * dtype.itemsize) // dtype.itemsize
    num_places = max(0, (elements.numel() - dim) // step + 1)
    return elements.as_strided((num_places, dim), (step, 1)), places


def _stretches(records: Tensor, slots: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Yields ascending slots a stretch at a time: the range from its first to its last slot, and the chosen slots in it
    or None for all of it. slots: None for all."""
    num_slots = max(1, STRETCH_BYTES // (records.stride(0) * records.itemsize))
    num_chosen = len(records) if slots is None else len(slots)
    for first in range(0, num_chosen, num_slots):
        end = min(first + num_slots, num_chosen)
        if slots is None:
            yield slice(first, end), None
            continue
        stretch = slice(int(slots[first]), int(slots[end - 1]) + 1)
        yield stretch, None if stretch.stop - stretch.start == end - first else slots[first:end]
