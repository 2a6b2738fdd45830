"""The memory of rows in training: host memory, or that of a device. One interface, two implementations.

All work on rows between the host store and the model goes through it: it fills and drains records, and copies, adds,
sums and updates rows and gradients by index. Each call handles all tables of a group.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.device.growing import GrowingArray
from nestpipe.device.streams import Mark, is_accelerator
from nestpipe.device.transfer import OfTensors
from nestpipe.embedding.cluster import GIVEN_ORDER, Clustering
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.group import FeatureGroups, TableGroup
from nestpipe.embedding.optim import RowOptimizer
from nestpipe.embedding.packed import PackedBatch
from nestpipe.kernels.rows.segments import Segments

T = TypeVar("T", bound=OfTensors)

HostCall = Callable[[Tensor, slice, Tensor | None], None]
"""Function of an array of records in host memory, a stretch of a list of slots, and the places of their records in the
array, None for all its rows in order."""


class Swap(Protocol):
    """Records that arrive in slots. A memory swaps them for others a stretch at a time."""

    @property
    def num_arriving(self) -> int: ...

    def gather(self, array: Tensor, stretch: slice, places: Tensor | None) -> None:
        """A HostCall: reads arriving records from the host store."""

    def assign(self, stretch: slice) -> "SwapStretch":
        """Gives slots to records that arrive, stretch after stretch. Another thread may do so, and call `fill`, while
        records of other stretches are gathered and scattered."""


class SwapStretch(Protocol):
    """Records that arrive in slots, some of which hold others that have to leave for the host store first."""

    @property
    def arriving(self) -> Tensor:
        """Returns the slots of the records that arrive."""

    @property
    def leaving(self) -> Tensor:
        """Returns the last of them: their records are scattered before others arrive there."""

    def scatter(self, array: Tensor, stretch: slice, places: Tensor | None) -> None:
        """A HostCall: writes leaving records to the host store."""

    def fill(self) -> None:
        """Takes note that the records have arrived, or will have when the work of the stream is done."""


class Memory(Protocol):
    """Memory of one kind. Places are row indices, distinct within a call; None stands for all rows, in order."""

    device: torch.device
    is_host: bool
    """True if it is host memory, which needs no copies to and from the host store."""

    def empty_rows(self, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Returns uninitialised rows."""

    def new_records(self, num_columns: int, dtype: torch.dtype) -> GrowingArray:
        """Returns an array of records, without slots yet."""

    def upload(self, value: T) -> T:
        """Returns a value with all its tensors in this memory."""

    def new_bytes(self, number: int) -> Tensor:
        """Returns uninitialised bytes of host memory, from which copies to this memory are fastest."""

    def prepare_batch(
        self,
        features: FeatureGroups,
        batch: Batch | None,
        num_micro_batches: int,
        world_size: int,
        num_threads: int = 1,
        clustering: Clustering = GIVEN_ORDER,
    ) -> BatchDedup | PackedBatch:
        """Checks a batch and does with its keys what is done in host memory. batch: None if this rank has none."""

    def upload_batch(self, batch: BatchDedup | PackedBatch) -> BatchDedup:
        """Returns a batch with distinct keys in host memory; the inputs of the model, and where rows are used, in this
        memory."""

    def empty_list(self, number: int) -> Tensor:
        """Returns an uninitialised list of int64 in host memory, from which upload_list copies fastest."""

    def upload_list(self, numbers: Tensor) -> Tensor:
        """Returns a list of empty_list in this memory."""

    def fill_records(self, records: Tensor, slots: Tensor | None, gather: HostCall) -> None:
        """Fills slots from the host store; `gather` writes to host memory. slots: in host memory; None for all."""

    def drain_records(self, records: Tensor, slots: Tensor | None, scatter: HostCall) -> None:
        """Writes slots to the host store; `scatter` reads from host memory."""

    def swap_records(self, records: Tensor, swap: "Swap") -> None:
        """Writes slots to the host store and fills slots from it, both at once."""

    def copy_rows(self, source: Tensor, from_places: Tensor | None, target: Tensor, to_places: Tensor | None) -> None:
        """Copies rows: target[to_places] = source[from_places]."""

    def add_rows(
        self,
        target: Tensor,
        places: Tensor | None,
        source: Tensor,
        is_first: Tensor | None,
        limit: float,
        exceeds: Tensor | None,
    ) -> None:
        """Adds rows: target[places] += source, or target[places] = 0 + source where is_first.

        Sets `exceeds` if a sum is not finite or larger in magnitude than `limit`.
        """

    def check_rows(self, rows: Tensor, limit: float, exceeds: Tensor) -> None:
        """Sets `exceeds` if an element is not finite or larger in magnitude than `limit`."""

    def new_flag(self) -> Tensor:
        """Returns one int32 of value 0, which add_rows and check_rows can set."""

    def sum_rows(self, values: Tensor, segments: Segments, weights: Tensor | None = None) -> Tensor:
        """Returns the sum of each segment, added in order. weights: factor of each entry; None if all are 1."""

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
        """Applies a row optimizer to slots, None for all, unless `is_masked`, a bool on the device, is true."""

    def empty_message(self, num_bytes: int) -> Tensor:
        """Returns uninitialised memory for a message that a channel can send or receive."""

    def write_message(
        self, source: Tensor, places: Tensor | None, message: Tensor, message_places: Tensor | None
    ) -> None:
        """Copies source[places], or all rows in order if places is None, to a message. message_places count in units
        (see plan.py); None for contiguous rows."""

    def read_message(
        self, message: Tensor, message_places: Tensor | None, target: Tensor, places: Tensor | None
    ) -> None:
        """Copies rows of a message to target[places], or to all rows of target in order if places is None."""

    def sealed(self, message: Tensor) -> Mark:
        """Returns an event that fires when the message is complete; None if stream order already guarantees it."""

    def consumed(self, message: Tensor) -> None:
        """Keeps a received message alive until the work enqueued so far has read it."""


def memory_on(device: torch.device, *, is_staged: bool = False) -> Memory:
    """Returns the memory of a device. is_staged: messages are in host memory."""
    if is_accelerator(device):
        from nestpipe.embedding.device_memory import DeviceMemory

        return DeviceMemory(device, is_staged)
    from nestpipe.embedding.host_memory import HostMemory

    return HostMemory()


def update_records(
    memory: Memory,
    group: TableGroup,
    optimizer: RowOptimizer,
    records: Tensor,
    slots: Tensor | None,
    gradient: Tensor,
    step: int,
    is_masked: Tensor | None,
) -> None:
    """Applies the row optimizer of a group. One that needs dense arrays gets a copy of the slots."""
    dim, end = group.dim, group.num_columns
    if slots is None or optimizer.takes_slots(is_on_device=is_masked is not None):
        optimizer.apply(records[:, :dim], records[:, dim:end], gradient, step, is_masked, slots)
        return
    dense = memory.empty_rows(len(slots), records.shape[1], group.dtype)
    memory.copy_rows(records, slots, dense, None)
    optimizer.apply(dense[:, :dim], dense[:, dim:end], gradient, step, is_masked)
    memory.copy_rows(dense, None, records, slots)
