"""The memory of rows in training: host memory, or that of a device. One interface, two implementations.

All work on rows between the host store and the model goes through it: it fills and drains records, and copies, adds,
sums and updates rows and gradients by index. Each call handles all tables of a group.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nestpipe.device.streams import Mark, is_accelerator
from nestpipe.device.transfer import OfTensors
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.group import FeatureGroups
from nestpipe.embedding.optim import RowOptimizer
from nestpipe.kernels.rows.segments import Segments

T = TypeVar("T", bound=OfTensors)

HostCall = Callable[[Tensor, slice, Tensor | None], None]
"""Function of an array of records in host memory, a range of its slots, and the chosen slots or None for all."""


class Memory(Protocol):
    """Memory of one kind. Places are row indices, distinct within a call; None stands for all rows, in order."""

    device: torch.device
    has_mirrors: bool
    """True if records pass through a mirror, pinned host memory of the same shape."""

    def empty_rows(self, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Returns uninitialised rows."""

    def empty_records(self, num_slots: int, num_columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns uninitialised records, and their mirror if they have one."""

    def upload(self, value: T) -> T:
        """Returns a value with all its tensors in this memory."""

    def upload_batch(self, features: FeatureGroups, batch: BatchDedup) -> BatchDedup:
        """Returns a batch with the model's inputs and the row index in this memory. Keys stay in host memory."""

    def fill_records(self, records: Tensor, mirror: Tensor | None, slots: Tensor | None, gather: HostCall) -> None:
        """Fills slots from the host store; `gather` writes to host memory."""

    def drain_records(self, records: Tensor, mirror: Tensor | None, slots: Tensor | None, scatter: HostCall) -> None:
        """Writes slots to the host store; `scatter` reads from host memory."""

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

    def sum_rows(self, values: Tensor, segments: Segments) -> Tensor:
        """Returns the sum of each segment, added in order."""

    def update(
        self,
        optimizer: RowOptimizer,
        rows: Tensor,
        state: Tensor,
        gradient: Tensor,
        step: int,
        is_masked: Tensor | None,
    ) -> None:
        """Applies a row optimizer in place, unless `is_masked`, a bool on the device, is true."""

    def empty_message(self, num_bytes: int) -> Tensor:
        """Returns uninitialised memory for a message that a channel can send or receive."""

    def write_message(self, source: Tensor, places: Tensor, message: Tensor, message_places: Tensor | None) -> None:
        """Copies source[places] to a message. message_places count in units (see plan.py); None for contiguous rows."""

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
