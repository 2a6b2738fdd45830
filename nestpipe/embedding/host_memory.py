"""Rows in host memory, handled by the native library."""

from typing import TypeVar

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.device.growing import GrowingArray
from nestpipe.device.streams import Mark
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import OfTensors
from nestpipe.embedding.cluster import GIVEN_ORDER, Clustering
from nestpipe.embedding.dedup import BatchDedup, dedup_batch
from nestpipe.embedding.group import FeatureGroups, TableGroup
from nestpipe.embedding.memory import HostCall, Swap, update_records
from nestpipe.embedding.optim import RowOptimizer
from nestpipe.embedding.packed import PackedBatch
from nestpipe.embedding.pooling import Occurrences, pool_into
from nestpipe.embedding.recycler import recycled
from nestpipe.embedding.travel import message_unit
from nestpipe.kernels.rows.segments import Segments
from nestpipe.store.native import row_ops

T = TypeVar("T", bound=OfTensors)


class HostMemory:
    """See Memory. Bulk calls use as many threads as torch does."""

    device = torch.device("cpu")
    is_host = True

    def empty_rows(self, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        rows = recycled.empty((num_rows, dim), dtype)
        embedding_memory.add(rows)
        return rows

    def new_records(self, num_columns: int, dtype: torch.dtype) -> GrowingArray:
        return GrowingArray(num_columns, dtype, self.device)

    def upload(self, value: T) -> T:
        return value

    def new_bytes(self, number: int) -> Tensor:
        return recycled.empty((number,), torch.uint8)

    def prepare_batch(
        self,
        features: FeatureGroups,
        batch: Batch | None,
        num_micro_batches: int,
        world_size: int,
        num_threads: int = 1,
        clustering: Clustering = GIVEN_ORDER,
    ) -> BatchDedup:
        return dedup_batch(features, batch, num_micro_batches, world_size, num_threads, clustering)

    def upload_batch(self, batch: BatchDedup | PackedBatch) -> BatchDedup:
        assert isinstance(batch, BatchDedup)
        return batch

    def empty_list(self, number: int) -> Tensor:
        return recycled.empty((number,), torch.int64)

    def upload_list(self, numbers: Tensor) -> Tensor:
        return numbers

    def fill_records(self, records: Tensor, slots: Tensor | None, gather: HostCall) -> None:
        gather(records, slice(0, len(records if slots is None else slots)), slots)

    def drain_records(self, records: Tensor, slots: Tensor | None, scatter: HostCall) -> None:
        scatter(records, slice(0, len(records if slots is None else slots)), slots)

    def swap_records(self, records: Tensor, swap: Swap) -> None:
        stretch = swap.assign(slice(0, swap.num_arriving))
        if len(stretch.leaving) > 0:
            self.drain_records(records, stretch.leaving, stretch.scatter)
        self.fill_records(records, stretch.arriving, swap.gather)
        stretch.fill()

    def copy_rows(self, source: Tensor, from_places: Tensor | None, target: Tensor, to_places: Tensor | None) -> None:
        row_ops.copy_rows(source, from_places, target, to_places, torch.get_num_threads())

    def add_rows(
        self,
        target: Tensor,
        places: Tensor | None,
        source: Tensor,
        is_first: Tensor | None,
        limit: float,
        exceeds: Tensor | None,
    ) -> None:
        row_ops.add_rows(target, places, source.contiguous(), is_first, limit, exceeds, torch.get_num_threads())

    def check_rows(self, rows: Tensor, limit: float, exceeds: Tensor) -> None:
        row_ops.check_rows(rows.contiguous(), limit, exceeds, torch.get_num_threads())

    def new_flag(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32)

    def sum_rows(self, values: Tensor, segments: Segments, weights: Tensor | None = None) -> Tensor:
        total = self.empty_rows(segments.num_segments, values.shape[1], values.dtype)
        assert segments.offsets is not None
        if weights is not None:
            assert segments.order is not None
            pool_into(total, Occurrences(segments.order, segments.offsets, weights), values)
            return total
        row_ops.sum_rows(values, segments.order, segments.offsets, total, torch.get_num_threads())
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
        update_records(self, group, optimizer, records, slots, gradient, step, None)

    def empty_message(self, num_bytes: int) -> Tensor:
        message = recycled.empty((num_bytes,), torch.uint8)
        embedding_memory.add(message)
        return message

    def write_message(
        self, source: Tensor, places: Tensor | None, message: Tensor, message_places: Tensor | None
    ) -> None:
        unit = _unit(source, message_places)
        row_ops.write_rows(source, places, message, unit, message_places, torch.get_num_threads())

    def read_message(
        self, message: Tensor, message_places: Tensor | None, target: Tensor, places: Tensor | None
    ) -> None:
        unit = _unit(target, message_places)
        row_ops.read_rows(message, unit, message_places, target, places, torch.get_num_threads())

    def sealed(self, message: Tensor) -> Mark:
        return None

    def consumed(self, message: Tensor) -> None:
        pass


def _unit(rows: Tensor, message_places: Tensor | None) -> int:
    """Returns the unit of places in a message, in bytes; without places, rows are contiguous."""
    row_bytes = rows.shape[1] * rows.itemsize
    return row_bytes if message_places is None else message_unit(row_bytes)
