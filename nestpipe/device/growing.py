"""Arrays of rows that grow without moving.

Address space for the largest array is reserved once. Growing adds memory behind the rows that are in use, so tensors
and addresses stay valid, and no other thread or stream has to wait.
"""

import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator
from nestpipe.device.tally import embedding_memory

if TYPE_CHECKING:
    from nestpipe.device.cuda_memory import CudaMemory

_MAP_NORESERVE = 0x4000
"""Linux's flag for memory that the system need not hold ready; mmap has no name for it before Python 3.13."""
_HUGE_BYTES = 4 << 20
"""Arrays from this size on use huge pages, if the system has any."""


class GrowingArray:
    """Rows of `num_columns` elements on a device. Only the first `num_rows` rows of `rows` may be used."""

    def __init__(
        self, num_columns: int, dtype: torch.dtype, device: torch.device, most_bytes: int | None = None
    ) -> None:
        """most_bytes: bytes that the array may grow to; by default, all memory of the device or of the host."""
        self.num_rows = 0
        self.row_bytes = num_columns * dtype.itemsize
        self._device = device
        self._memory = _memory_of(device, most_bytes)
        most_rows = self._memory.most_bytes // self.row_bytes
        elements = self._memory.elements(dtype)[: most_rows * num_columns]
        self.rows: Tensor = elements.view(most_rows, num_columns)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def grow(self, num_rows: int) -> None:
        """Adds uninitialised rows, to `num_rows` in all. Raises MemoryError if the device has no memory left."""
        if num_rows > len(self.rows):
            raise MemoryError(f"an array of rows cannot grow to {num_rows * self.row_bytes / 1e9:,.2f} GB: {_REMEDY}")
        if num_rows > self.num_rows:
            self._memory.back(num_rows * self.row_bytes)
            self.num_rows = num_rows
            self.count()

    def count(self) -> None:
        """Adds the rows that the array has to the tally, if that has started since."""
        embedding_memory.resize(self, self._device, self.num_bytes)


_REMEDY = "take a smaller batch, more ranks, or a smaller memory.resident_bytes"


class _HostMemory:
    """Host memory. The system backs a page when it is first written."""

    def __init__(self, most_bytes: int | None) -> None:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.most_bytes = most_bytes if most_bytes is not None else physical
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE  # private: a fork must not write into it
        self._map = mmap.mmap(-1, max(self.most_bytes, 1), flags=flags)
        self._advised = 0

    def elements(self, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._map, dtype=dtype, count=self.most_bytes // dtype.itemsize)

    def back(self, num_bytes: int) -> None:
        end = num_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if end - self._advised >= _HUGE_BYTES:
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE, self._advised, end - self._advised)
            self._advised = end


class _PlainMemory:
    """Memory of an accelerator that cannot add memory to an array: an eighth of what is free, taken at once."""

    def __init__(self, device: torch.device, most_bytes: int | None) -> None:
        self.most_bytes = most_bytes if most_bytes is not None else free_bytes(device) // 8
        self._bytes = torch.empty(self.most_bytes, dtype=torch.uint8, device=device)

    def elements(self, dtype: torch.dtype) -> Tensor:
        return self._bytes[: self.most_bytes // dtype.itemsize * dtype.itemsize].view(dtype)

    def back(self, num_bytes: int) -> None:
        pass


def _memory_of(device: torch.device, most_bytes: int | None) -> "_HostMemory | _PlainMemory | CudaMemory":
    if not is_accelerator(device):
        return _HostMemory(most_bytes)
    if device.type == "cuda" and torch.version.hip is None:
        from nestpipe.device.cuda_memory import CudaMemory

        return CudaMemory(device, most_bytes)
    return _PlainMemory(device, most_bytes)


def free_bytes(device: torch.device) -> int:
    """Returns the memory of an accelerator that no process has allocated."""
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free)
