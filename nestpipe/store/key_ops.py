"""Bulk operations on keys that need no store: dedup, hashing, grouping by owner."""

from ctypes import byref, c_int64

import torch
from torch import Tensor

from nestpipe.store.interface import NUM_BUCKETS, check_array, check_integer, check_keys, check_name, check_threads
from nestpipe.store.native import call, pointer


def unique(keys: Tensor, num_threads: int = 1, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Distinct keys in order of first occurrence, and `inverse` such that unique[inverse] == keys.

    `out`: memory for both, as long as `keys`, to be used again from call to call; the first result is a view of it.
    """
    num_keys = check_keys(keys)
    check_threads(num_threads)
    distinct, inverse = out if out is not None else (torch.empty_like(keys), torch.empty_like(keys))
    for array in (distinct, inverse):
        check_array("out", array, torch.int64, [num_keys])
    num_unique = c_int64()
    call("unique", pointer(keys), num_keys, pointer(distinct), pointer(inverse), byref(num_unique), num_threads)
    return distinct[: num_unique.value], inverse


def group_by_owner(table: str, keys: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Positions of the keys, owner rank 0's first, in the given order within an owner; and how many each owner has."""
    check_name(table)
    check_integer("world_size", world_size, 1, NUM_BUCKETS)
    num_keys = check_keys(keys)
    order, counts = torch.empty_like(keys), torch.empty(world_size, dtype=torch.int64)
    call("group_by_owner", table.encode(), pointer(keys), num_keys, world_size, pointer(order), pointer(counts))
    return order, counts


def hash_keys(table: str, keys: Tensor) -> Tensor:
    """mix64(key, table name) as int64 bit patterns. The top 16 bits are the key's bucket."""
    check_name(table)
    num_keys = check_keys(keys)
    hashes = torch.empty_like(keys)
    call("hash", table.encode(), pointer(keys), num_keys, pointer(hashes))
    return hashes
