"""Large memory that is reused. Fails if Recycler.empty reuses memory of which a part is in use."""

import gc

import torch

from nestpipe.embedding.recycler import LARGE_BYTES, Recycler
from tests.forked import run_forked


def test_memory_is_reused_only_when_free() -> None:
    recycler, shape = Recycler(), (LARGE_BYTES // 4, 2)
    first = recycler.empty(shape, torch.float32)
    part, address = first[5:9], first.data_ptr()
    part.fill_(7.0)
    del first
    gc.collect()
    second = recycler.empty(shape, torch.float32)
    assert second.data_ptr() != address
    second.fill_(1.0)
    assert (part == 7.0).all()
    del part
    gc.collect()
    assert recycler.empty(shape, torch.float32).data_ptr() == address


def test_the_block_freed_last_is_reused_first() -> None:
    """Caches may still hold it. Fails if _allocate looks at the free blocks in the order in which they were freed."""
    recycler, shape = Recycler(), (LARGE_BYTES,)
    first, second = recycler.empty(shape, torch.uint8), recycler.empty(shape, torch.uint8)
    address = second.data_ptr()
    del first
    gc.collect()
    del second
    gc.collect()
    assert recycler.empty(shape, torch.uint8).data_ptr() == address


FORKS = """
import os, torch
from nestpipe.embedding.recycler import LARGE_BYTES, Recycler
mine = Recycler().empty((LARGE_BYTES,), torch.float32)
mine[0] = 1.0
child = os.fork()
if child == 0:
    mine[0] = 7.0
    os._exit(0)
os.waitpid(child, 0)
assert float(mine[0]) == 1.0
"""


def test_recycled_memory_is_not_shared_with_forked_processes() -> None:
    """Fails if the Recycler maps shared memory, which is mmap's default."""
    done = run_forked(exec, FORKS, {})
    assert done.returncode == 0, done.stderr
