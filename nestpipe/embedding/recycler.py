"""Large tensors whose memory is reused.

The C library returns large blocks to the system and allocates them anew, and each 4 KiB of new memory costs a page
fault. For a tensor of tens of megabytes that is made once a step, this takes several times as long as the work on it.
"""

import math
import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

LARGE_BYTES = 1 << 20
_PAGE_BYTES = 2 << 20


class Recycler:
    """Allocates tensors. When the last tensor that uses a block is gone, the block is free for the next one."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.RLock()  # a finalizer may run inside `_allocate`, in the same thread

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < LARGE_BYTES:
            return torch.empty(shape, dtype=dtype)
        block = self._allocate(num_bytes)
        used = memoryview(block)  # only the tensor's storage holds it
        weakref.finalize(used, self._give_back, block).atexit = False
        storage = torch.frombuffer(used, dtype=dtype).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage).resize_(shape)  # not a view: it may be changed in place

    def _allocate(self, num_bytes: int) -> mmap.mmap:
        with self._lock:
            fitting = [block for block in reversed(self._free) if len(block) >= num_bytes]
            if fitting:
                block = min(fitting, key=len)  # of those, the last one freed: caches may still hold it
                self._free.remove(block)
                return block
            self._free.clear()  # sizes have grown: smaller blocks would stay unused
        # Private: a forked process must not write into its parent's rows.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        block = mmap.mmap(-1, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES, flags=flags)
        if whole_pages := num_bytes // _PAGE_BYTES * _PAGE_BYTES:  # the rest takes no more memory than it needs
            with suppress(OSError):  # a kernel without huge pages
                block.madvise(mmap.MADV_HUGEPAGE, 0, whole_pages)
        return block

    def _give_back(self, block: mmap.mmap) -> None:
        with self._lock:
            self._free.append(block)


recycled = Recycler()
