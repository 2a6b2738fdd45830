"""Rows in device memory: handled by kernels, and copied through pinned host memory to and from the host store.

A record begins at a multiple of 16 bytes, which a device reads at once.

If ranks share a device, messages are in pinned host memory too. Kernels read and write them there, because copies would
queue behind those of records.
"""

from typing import TypeVar

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.device.growing import GrowingArray
from nestpipe.device.streams import Mark, mark
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import ALIGNMENT, OfTensors, host_empty, uploaded
from nestpipe.embedding.cluster import GIVEN_ORDER, Clustering
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.device_dedup import dedup_on_device
from nestpipe.embedding.group import FeatureGroups, TableGroup
from nestpipe.embedding.host_link import HostLink
from nestpipe.embedding.memory import HostCall, Swap, update_records
from nestpipe.embedding.optim import RowOptimizer
from nestpipe.embedding.packed import PackedBatch, pack_batch
from nestpipe.embedding.travel import message_unit
from nestpipe.kernels.rows import copy as row_kernels
from nestpipe.kernels.rows.pinned import keep_alive_until
from nestpipe.kernels.rows.segments import Segments, sum_segments

T = TypeVar("T", bound=OfTensors)


class DeviceMemory:
    """See Memory. Calls enqueue work in the calling thread's stream."""

    is_host = False

    def __init__(self, device: torch.device, is_staged: bool) -> None:
        self.device = device
        self._is_staged = is_staged
        self._link = HostLink(device)

    def empty_rows(self, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        rows = torch.empty(num_rows, dim, dtype=dtype, device=self.device)
        embedding_memory.add(rows)
        return rows

    def new_records(self, num_columns: int, dtype: torch.dtype) -> GrowingArray:
        aligned = ALIGNMENT // dtype.itemsize
        return GrowingArray(-(-num_columns // aligned) * aligned, dtype, self.device)

    def upload(self, value: T) -> T:
        return uploaded(value, self.device)

    def new_bytes(self, number: int) -> Tensor:
        return host_empty((number,), torch.uint8, self.device)

    def prepare_batch(
        self,
        features: FeatureGroups,
        batch: Batch | None,
        num_micro_batches: int,
        world_size: int,
        num_threads: int = 1,
        clustering: Clustering = GIVEN_ORDER,
    ) -> PackedBatch:
        numbers = num_micro_batches, world_size, num_threads
        return pack_batch(features, batch, *numbers, clustering, self.new_bytes)

    def upload_batch(self, batch: BatchDedup | PackedBatch) -> BatchDedup:
        assert isinstance(batch, PackedBatch)
        return dedup_on_device(batch, self.device)

    def empty_list(self, number: int) -> Tensor:
        return host_empty((number,), torch.int64, self.device)

    def upload_list(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.device, non_blocking=True)

    def fill_records(self, records: Tensor, slots: Tensor | None, gather: HostCall) -> None:
        self._link.fill(records, slots, gather)

    def drain_records(self, records: Tensor, slots: Tensor | None, scatter: HostCall) -> None:
        self._link.drain(records, slots, scatter)

    def swap_records(self, records: Tensor, swap: Swap) -> None:
        self._link.swap(records, swap)

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
        row_kernels.find_large(rows, limit, exceeds)

    def new_flag(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    def sum_rows(self, values: Tensor, segments: Segments, weights: Tensor | None = None) -> Tensor:
        total = self.empty_rows(segments.num_segments, values.shape[1], values.dtype)
        sum_segments(values, segments, weights, total)
        return total

    def update(
        self,
        group: TableGroup,
        optimizer: RowOptimizer,
        records: Tensor,
        slots: Tensor | None,
        gradient: Tensor,
        step: int,
        is_masked: Tensor | None,
    ) -> None:
        update_records(self, group, optimizer, records, slots, gradient, step, is_masked)

    def empty_message(self, num_bytes: int) -> Tensor:
        if self._is_staged:
            return host_empty((num_bytes,), torch.uint8, self.device)
        message = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        embedding_memory.add(message)
        return message

    def write_message(
        self, source: Tensor, places: Tensor | None, message: Tensor, message_places: Tensor | None
    ) -> None:
        num_rows = len(source if places is None else places)
        row_kernels.copy_rows(source, places, *_in_units(message, message_places, source, num_rows))

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
