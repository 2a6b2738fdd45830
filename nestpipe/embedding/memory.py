"""Where rows in training are: in host memory, or in the memory of a device. One interface, two implementations.

Everything that happens to rows between the host store and the model goes through it: records come and go, rows and
gradients are copied and added by place, summed, and updated. Each call handles all tables of a group.
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
"""(array of records in host memory, a stretch of its slots, which of them or None for all) -> None"""


class Memory(Protocol):
    """Memory of one kind. Places are distinct within a call; None stands for all rows, in order."""

    device: torch.device
    has_mirrors: bool
    """whether records pass through pinned host memory of the same shape"""

    def empty_rows(self, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Returns uninitialised rows."""

    def empty_records(self, num_slots: int, num_columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns uninitialised records, and pinned host memory of the same shape if they pass through such."""

    def upload(self, value: T) -> T:
        """Returns a value with all its tensors in this memory."""

    def upload_batch(self, features: FeatureGroups, batch: BatchDedup) -> BatchDedup:
        """Returns a batch with what the model is given, and where its rows lie, in this memory. Keys stay in host
        memory."""

    def fill_records(self, records: Tensor, mirror: Tensor | None, slots: Tensor | None, gather: HostCall) -> None:
        """Fills slots from the host store; `gather` writes to host memory."""

    def drain_records(self, records: Tensor, mirror: Tensor | None, slots: Tensor | None, scatter: HostCall) -> None:
        """Brings slots to the host store; `scatter` reads from host memory."""

    def copy_rows(self, source: Tensor, from_places: Tensor | None, target: Tensor, to_places: Tensor | None) -> None:
        """target[to_places] = source[from_places]"""

    def add_rows(
        self,
        target: Tensor,
        places: Tensor | None,
        source: Tensor,
        is_first: Tensor | None,
        limit: float,
        exceeds: Tensor | None,
    ) -> None:
        """target[places] += source; where is_first, what was there before does not count.

        Sets `exceeds` if a sum is not finite or larger in magnitude than `limit`.
        """

    def check_rows(self, rows: Tensor, limit: float, exceeds: Tensor) -> None:
        """Sets `exceeds` if an element is not finite or larger in magnitude than `limit`."""

    def new_flag(self) -> Tensor:
        """Returns one int32, 0: what add_rows and check_rows set."""

    def sum_rows(self, values: Tensor, segments: Segments) -> Tensor:
        """Returns the sum of each segment, its entries added one after another."""

    def update(
        self,
        optimizer: RowOptimizer,
        rows: Tensor,
        state: Tensor,
        gradient: Tensor,
        step: int,
        is_masked: Tensor | None,
    ) -> None:
        """Applies a row optimizer in place; where `is_masked`, known to the device alone, is true nothing changes."""

    def empty_message(self, num_bytes: int) -> Tensor:
        """Returns uninitialised memory for a message, which a channel can send from and receive into."""

    def write_message(self, source: Tensor, places: Tensor, message: Tensor, message_places: Tensor | None) -> None:
        """Copies source[places] to a message; its places count in units, see plan.py. None: from the beginning on."""

    def read_message(
        self, message: Tensor, message_places: Tensor | None, target: Tensor, places: Tensor | None
    ) -> None:
        """Copies rows of a message to target[places]; None: to all rows of target, in order."""

    def sealed(self, message: Tensor) -> Mark:
        """Returns an event that fires when the message is complete; None if stream order already guarantees it."""

    def consumed(self, message: Tensor) -> None:
        """Keeps a received message alive until what was enqueued so far has read it."""


def memory_on(device: torch.device, *, is_staged: bool = False) -> Memory:
    """Returns the memory of a device. is_staged: messages pass through host memory."""
    if is_accelerator(device):
        from nestpipe.embedding.device_memory import DeviceMemory

        return DeviceMemory(device, is_staged)
    from nestpipe.embedding.host_memory import HostMemory

    return HostMemory()
