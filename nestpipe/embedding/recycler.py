"""Large tensors whose memory is used again.

The C library gives large blocks back to the system and asks for them anew, and each 4 KiB of new memory costs a page
fault: for what is made once a step and is tens of megabytes, several times the work that is done in it.
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
    """Hands out memory; when the last tensor that uses a block is gone, the block is free for the next one."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.RLock()  # a finalizer may run in the middle of `_take`, in the same thread

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < LARGE_BYTES:
            return torch.empty(shape, dtype=dtype)
        block = self._take(num_bytes)
        used = memoryview(block)  # which the tensor's storage holds, and nobody else
        weakref.finalize(used, self._give_back, block).atexit = False
        storage = torch.frombuffer(used, dtype=dtype).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage).resize_(shape)  # no view: it may be changed in place

    def _take(self, num_bytes: int) -> mmap.mmap:
        with self._lock:
            fitting = [block for block in self._free if len(block) >= num_bytes]
            if fitting:
                block = min(fitting, key=len)
                self._free.remove(block)
                return block
            self._free.clear()  # sizes have grown: smaller blocks would lie idle
        # Private: a forked process must not write into the rows of another.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        block = mmap.mmap(-1, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES, flags=flags)
        with suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _give_back(self, block: mmap.mmap) -> None:
        with self._lock:
            self._free.append(block)


recycled = Recycler()
