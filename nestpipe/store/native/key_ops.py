"""Bulk operations on arrays that need no store: dedup, matching, hashing, grouping by owner or by row, checksums."""

from ctypes import byref, c_int64, c_uint32

import torch
from torch import Tensor

from nestpipe.store.interface import (
    NUM_BUCKETS,
    check_array,
    check_integer,
    check_keys,
    check_name,
    check_offsets,
    check_threads,
)
from nestpipe.store.native.library import call, pointer


def unique(keys: Tensor, num_threads: int = 1, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Returns distinct keys in order of first occurrence, and `inverse` such that unique[inverse] == keys.

    `out`: memory for both results, each as long as `keys`; the first result is a view of it.
    """
    num_keys = check_keys(keys)
    check_threads(num_threads)
    distinct, inverse = out if out is not None else (torch.empty_like(keys), torch.empty_like(keys))
    for array in (distinct, inverse):
        check_array("out", array, torch.int64, [num_keys])
    num_unique = c_int64()
    call("unique", pointer(keys), num_keys, pointer(distinct), pointer(inverse), byref(num_unique), num_threads)
    return distinct[: num_unique.value], inverse


def match_tables(
    before: Tensor, before_offsets: Tensor, keys: Tensor, key_offsets: Tensor, num_threads: int = 1
) -> Tensor:
    """Returns the index in `before` of each of `keys`, searched within the same table; -1 if it is not there.

    Table t has keys offsets[t] .. offsets[t + 1] - 1 of either list. Those of `before` are distinct within a table.
    """
    num_before, num_keys = check_keys(before), check_keys(keys)
    check_threads(num_threads)
    num_tables = max(len(key_offsets), 1) - 1
    check_offsets("before_offsets", before_offsets, num_tables)
    check_offsets("key_offsets", key_offsets, num_tables)
    places = torch.empty_like(keys)
    call(
        "match_tables",
        pointer(before),
        num_before,
        pointer(before_offsets),
        pointer(keys),
        num_keys,
        pointer(key_offsets),
        num_tables,
        pointer(places),
        num_threads,
    )
    return places


def group_by_owner(table: str, keys: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Returns the positions of the keys, ordered by owner and then as given, and the number of keys of each owner."""
    check_name(table)
    check_integer("world_size", world_size, 1, NUM_BUCKETS)
    num_keys = check_keys(keys)
    order, counts = torch.empty_like(keys), torch.empty(world_size, dtype=torch.int64)
    call("group_by_owner", table.encode(), pointer(keys), num_keys, world_size, pointer(order), pointer(counts))
    return order, counts


def group_by_row(
    index: Tensor, offsets: Tensor | None, num_rows: int, with_occurrences: bool = True
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Groups occurrences by row. Returns the offsets of the rows, the occurrences of each row in order, their samples.

    Occurrence i has row index[i], or no row if that is num_rows. Sample s has occurrences offsets[s] ..
    offsets[s + 1] - 1; without offsets, occurrence s alone.
    """
    num_occurrences = check_keys(index)
    check_integer("num_rows", num_rows, 0, 2**40 - 1)
    if offsets is not None:
        check_array("offsets", offsets, torch.int64, [max(len(offsets), 1)])
    num_samples = num_occurrences if offsets is None else len(offsets) - 1
    row_offsets, samples = torch.empty(num_rows + 1, dtype=torch.int64), torch.empty_like(index)
    occurrences = torch.empty_like(index) if with_occurrences and offsets is not None else None
    call(
        "group_by_row",
        pointer(index),
        num_occurrences,
        pointer(offsets),
        num_samples,
        num_rows,
        pointer(row_offsets),
        pointer(occurrences),
        pointer(samples),
    )
    if with_occurrences and occurrences is None:
        occurrences = samples
    grouped = slice(int(row_offsets[-1]))
    return row_offsets, None if occurrences is None else occurrences[grouped], samples[grouped]


def hash_keys(table: str, keys: Tensor) -> Tensor:
    """Returns mix64(key, table name) as int64 bit patterns. The top 16 bits are the key's bucket."""
    check_name(table)
    num_keys = check_keys(keys)
    hashes = torch.empty_like(keys)
    call("hash", table.encode(), pointer(keys), num_keys, pointer(hashes))
    return hashes


def crc32c(data: Tensor, before: int = 0) -> int:
    """Returns the CRC-32C of a tensor's bytes, behind others whose checksum is `before`. Releases the interpreter's
    lock."""
    if not data.is_cpu or not data.is_contiguous():
        raise ValueError("data must be in host memory and contiguous")
    checksum = c_uint32()
    call("crc32c", pointer(data), data.nbytes, before, byref(checksum))
    return checksum.value
