"""Operations on the keys of a batch, for all tables and ranks at once: dedup, owners, the parts that use a key.

Each function is one native call. A matrix of counts is an int32 tensor [ranks, tables].
"""

from collections.abc import Sequence
from ctypes import byref, c_int64, c_uint64
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.store.interface import check_array, check_name
from nestpipe.store.native.library import call, pointer

FEATURE_KEYS_WIDTH, FEATURE_SAMPLES_WIDTH = 6, 3
_WHICH = {"first": 0, "last": 1, "all": 2}


class Deduped(NamedTuple):
    """The distinct keys of a batch, ordered by (owner, table, first occurrence). The index of a key in this order is
    its position. Meaningless if `outside` is not None."""

    keys: Tensor
    counts: Tensor
    """[world_size, tables] int32: distinct keys."""
    positions: Tensor
    """[occurrences] of all features, concatenated: the position of the key, -1 for padding."""
    outside: tuple[int, int] | None
    """First feature with a key outside of its limit, and the first such occurrence in it; None if there is none."""


@dataclass(frozen=True)
class Split:
    """A batch cut into parts, and the rows that each part uses."""

    uses: Tensor
    """[distinct keys, ceil(parts / 8)] uint8: bit p % 8 of byte p // 8 is set if part p uses the key."""
    row_positions: Tensor
    """Positions that each part uses, ordered by (part, table, position): the rows of the part."""
    is_first: Tensor
    """[row positions] bool: True if no earlier part uses the position."""
    row_counts: Tensor
    """[parts, tables] int64: number of rows."""
    index: Tensor
    """[occurrences], ordered by (part, feature, sample, occurrence): the row of the key among the part's rows of its
    table; for padding, the number of those rows."""
    index_offsets: Tensor
    """[parts * features + 1]: start of each feature of each part in `index`."""
    offsets: Tensor
    """Offsets of the samples of each part and feature, each from 0, concatenated."""
    sources: Tensor | None
    """[occurrences]: for each entry of `index`, the occurrence it came from, counted through all features."""


def table_salts(names: Sequence[str]) -> Tensor:
    """Returns the salt with which the keys of each table are hashed, as int64 bit patterns."""
    salts, salt = torch.empty(len(names), dtype=torch.int64), c_uint64()
    for i, name in enumerate(names):
        check_name(name)
        call("table_salt", name.encode(), byref(salt))
        salts[i] = c_int64(salt.value).value
    return salts


def dedup(features: NDArray[np.int64], salts: Tensor, world_size: int, num_threads: int = 1) -> Deduped:
    """Finds the distinct keys of each table, their owners, and the position of every occurrence.

    `features`: [F, 6], for each feature the address of its keys, their number, its table (ascending), whether it has
    padding, the key that stands for padding, and the exclusive upper limit of keys (0 for no limit). The caller keeps
    the keys alive.
    """
    check_features(features, FEATURE_KEYS_WIDTH)
    check_values("salts", salts, torch.int64)
    num_occurrences = int(features[:, 1].sum())
    check_size("features", num_occurrences)
    keys, positions = torch.empty(num_occurrences, dtype=torch.int64), torch.empty(num_occurrences, dtype=torch.int64)
    counts = torch.empty((world_size, len(salts)), dtype=torch.int32)
    num_distinct, outside = c_int64(), (c_int64 * 2)()
    call(
        "dedup",
        features.ctypes.data,
        len(features),
        pointer(salts),
        len(salts),
        world_size,
        pointer(keys),
        pointer(counts),
        pointer(positions),
        byref(num_distinct),
        byref(outside),
        num_threads,
    )
    first_outside = None if outside[0] < 0 else (outside[0], outside[1])
    return Deduped(keys[: num_distinct.value], counts, positions, first_outside)


def split(
    features: NDArray[np.int64],
    positions: Tensor,
    counts: Tensor,
    num_distinct: int,
    samples: Tensor | None,
    part_offsets: Tensor,
    num_samples: int,
    with_sources: bool = False,
) -> Split:
    """Cuts the samples of a batch into parts, and numbers the rows that each part uses.

    `features`: [F, 3], for each feature the address of its offsets (num_samples + 1 of them), the number of its keys
    and its table; the caller keeps the offsets alive. `positions`, `counts`: results of `dedup`, which found
    `num_distinct` keys. `samples`: the order of the samples, a permutation; None if they keep their order.
    `part_offsets`: part p has samples part_offsets[p] .. part_offsets[p + 1] - 1 of this order.
    """
    check_features(features, FEATURE_SAMPLES_WIDTH)
    check_values("positions", positions, torch.int64)
    num_ranks, num_tables = _check_matrix(counts)
    check_values("part_offsets", part_offsets, torch.int64)
    if samples is not None:
        check_values("samples", samples, torch.int64, num_samples)
    num_parts, num_features, num_occurrences = len(part_offsets) - 1, len(features), len(positions)
    if num_parts < 1:
        raise ValueError("part_offsets must have at least two entries")
    if int(features[:, 1].sum()) != num_occurrences:
        raise ValueError(f"{num_occurrences} positions, but the features have {int(features[:, 1].sum())} keys")
    for what, size in (("num_distinct", num_distinct), ("num_samples", num_samples)):
        check_size(what, size)
    most_rows = num_distinct if num_parts == 1 else num_occurrences
    if num_distinct > num_occurrences:
        raise ValueError(f"num_distinct is {num_distinct}, but there are {num_occurrences} positions")
    uses = torch.empty((num_distinct, (num_parts + 7) // 8), dtype=torch.uint8)
    row_positions = torch.empty(most_rows, dtype=torch.int64)
    is_first = torch.empty(most_rows, dtype=torch.bool)
    row_counts = torch.empty((num_parts, num_tables), dtype=torch.int64)
    index = torch.empty(num_occurrences, dtype=torch.int64)
    index_offsets = torch.empty(num_parts * num_features + 1, dtype=torch.int64)
    offsets = torch.empty(num_features * (num_samples + num_parts), dtype=torch.int64)
    sources = torch.empty(num_occurrences, dtype=torch.int64) if with_sources else None
    num_rows = c_int64()
    call(
        "split",
        features.ctypes.data,
        num_features,
        pointer(positions),
        pointer(counts),
        num_ranks,
        num_tables,
        num_distinct,
        pointer(samples),
        pointer(part_offsets),
        num_parts,
        num_samples,
        pointer(uses),
        pointer(row_positions),
        pointer(is_first),
        pointer(row_counts),
        byref(num_rows),
        pointer(index),
        pointer(index_offsets),
        pointer(offsets),
        pointer(sources),
    )
    if num_rows.value != most_rows:
        row_positions, is_first = row_positions[: num_rows.value], is_first[: num_rows.value]
    return Split(uses, row_positions, is_first, row_counts, index, index_offsets, offsets, sources)


def owner_dedup(keys: Tensor, counts: Tensor, num_threads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the distinct keys that all ranks ask for, ordered by (table, first occurrence); the slot of each of
    `keys`, which is its index among the distinct keys; and the number of distinct keys of each table, [tables].

    `keys`: ordered by (rank, table), counts[rank, table] of each.
    """
    check_values("keys", keys, torch.int64)
    num_ranks, num_tables = _check_matrix(counts)
    distinct, slots = torch.empty_like(keys), torch.empty_like(keys)
    table_counts = torch.empty(num_tables, dtype=torch.int64)
    num_distinct = c_int64()
    call(
        "owner_dedup",
        pointer(keys),
        len(keys),
        pointer(counts),
        num_ranks,
        num_tables,
        pointer(distinct),
        pointer(slots),
        pointer(table_counts),
        byref(num_distinct),
        num_threads,
    )
    return distinct[: num_distinct.value], slots, table_counts


def exchange_lists(
    uses: Tensor, num_parts: int, which: str, rank_counts: Tensor, own_rank: int, capacity: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Lists the keys that travel with each part. Returns three arrays: the indices of the keys, part by part, those of
    other ranks ascending, then those of own_rank ascending; offsets [2 * num_parts + 1], where part p has other ranks'
    keys from offsets[2 p] and own keys from offsets[2 p + 1]; and the number of keys of each rank, [num_parts, ranks],
    with 0 for own_rank.

    `uses`: the parts that use each key, as in `Split`. `which`: a key travels with the "first", the "last" or "all"
    parts that use it. `rank_counts`: number of keys of each rank; keys are ordered by rank. `capacity`: upper bound of
    the length of the lists; without it, "all" makes one more call to count.
    """
    if which not in _WHICH:
        raise ValueError(f"which is {which!r}, must be 'first', 'last' or 'all'")
    if not 1 <= num_parts <= 4096:
        raise ValueError(f"num_parts is {num_parts}, must be 1 .. 4096")
    num_keys, num_ranks = len(uses), len(rank_counts)
    check_values("uses", uses, torch.uint8, num_keys, (num_parts + 7) // 8)
    check_values("rank_counts", rank_counts, torch.int64)
    offsets = torch.empty(2 * num_parts + 1, dtype=torch.int64)
    counts = torch.empty((num_parts, num_ranks), dtype=torch.int64)

    def run(places: Tensor | None) -> None:
        call(
            "exchange_lists",
            pointer(uses),
            num_keys,
            num_parts,
            _WHICH[which],
            pointer(rank_counts),
            num_ranks,
            own_rank,
            pointer(places),
            0 if places is None else len(places),
            pointer(offsets),
            pointer(counts),
        )

    if capacity is None:
        if which == "all":
            run(None)
            capacity = int(offsets[-1])
        else:
            capacity = num_keys
    check_size("capacity", capacity)
    places = torch.empty(capacity, dtype=torch.int64)
    run(places)
    num_listed = num_keys if which != "all" else int(offsets[-1])
    if num_listed > capacity:  # native code takes a capacity of 0 for a call that only counts
        raise ValueError(f"places has room for {capacity} of {num_listed} keys")
    return (places if num_listed == capacity else places[:num_listed]), offsets, counts


class OnePartLists(NamedTuple):
    """The lists of a batch with one part; in all of them other ranks come first, ascending, then the own one."""

    rows_in: Tensor
    """[requests] place of each request when they are ordered by (table, rank)."""
    rows_out: Tensor
    """[entries] key index of each entry."""
    entries: Tensor
    """[entries] their numbers."""
    order: Tensor
    """[entries] numbers of the entries of each key, ascending."""
    offsets: Tensor
    """[keys + 1] start of each key in `order`."""


def one_part_lists(
    counts: Tensor, key_index: Tensor, entry_counts: NDArray[np.int64], num_requests: int, num_keys: int, own_rank: int
) -> OnePartLists:
    """Lists what travels in a batch with one part, to the owners of keys and from them.

    `counts`: [ranks, tables] requests of this rank, ordered by (rank, table). `key_index`: the key, below num_keys, of
    each entry, which is what a rank asks this one for; entry_counts[rank] of each, ordered by rank.
    """
    num_ranks, num_tables = _check_matrix(counts)
    check_values("key_index", key_index, torch.int64)
    for what, size in (("num_requests", num_requests), ("num_keys", num_keys)):
        check_size(what, size)
    num_entries = key_index.shape[0]
    rows_in = torch.empty(num_requests, dtype=torch.int64)
    rows_out, entries, order = (torch.empty(num_entries, dtype=torch.int64) for _ in range(3))
    offsets = torch.empty(num_keys + 1, dtype=torch.int64)
    call(
        "one_part_lists",
        pointer(counts),
        num_ranks,
        num_tables,
        num_requests,
        pointer(key_index),
        _int64_address("entry_counts", entry_counts, num_ranks),
        num_entries,
        num_keys,
        own_rank,
        *map(pointer, (rows_in, rows_out, entries, order, offsets)),
    )
    return OnePartLists(rows_in, rows_out, entries, order, offsets)


def cluster_numbers(counts: Tensor, bases: Tensor, num_positions: int) -> Tensor:
    """Numbers the positions of each table: returns for each position bases[table] plus the number of earlier positions
    of that table. Positions are ordered by (rank, table); `num_positions` is the sum of `counts`."""
    num_ranks, num_tables = _check_matrix(counts)
    check_values("bases", bases, torch.int64, num_tables)
    check_size("num_positions", num_positions)
    numbers = torch.empty(num_positions, dtype=torch.int64)
    call(
        "cluster_numbers",
        pointer(counts),
        num_ranks,
        num_tables,
        pointer(bases),
        num_positions,
        pointer(numbers),
    )
    return numbers


def copy_runs(
    source: Tensor,
    from_offsets: Tensor | NDArray[np.int64],
    target: Tensor,
    to_offsets: Tensor | NDArray[np.int64],
    sizes: Tensor | NDArray[np.int64],
) -> None:
    """Copies runs of bytes between two contiguous tensors of any dtype that do not overlap. Offsets and sizes are in
    bytes."""
    for what, array in (("source", source), ("target", target)):
        if not (array.is_cpu and array.is_contiguous()):
            raise ValueError(f"{what} must be contiguous and in host memory")
    num_runs = len(sizes)
    call(
        "copy_runs",
        pointer(source),
        source.nbytes,
        _int64_address("from_offsets", from_offsets, num_runs),
        pointer(target),
        target.nbytes,
        _int64_address("to_offsets", to_offsets, num_runs),
        _int64_address("sizes", sizes, num_runs),
        num_runs,
    )


def check_values(what: str, array: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Refuses an array that native code cannot read. Without a shape, it must have one dimension.

    Cheaper than check_array, which it calls only to raise the error.
    """
    fits = array.shape == shape if shape else array.dim() == 1
    if not (fits and array.dtype is dtype and array.is_cpu and array.is_contiguous()):
        check_array(what, array, dtype, shape or (None,))


def _check_matrix(counts: Tensor) -> tuple[int, int]:
    """Returns the numbers of ranks and tables."""
    if not (counts.dim() == 2 and counts.dtype is torch.int32 and counts.is_cpu and counts.is_contiguous()):
        check_array("counts", counts, torch.int32, (None, None))
    num_ranks, num_tables = counts.shape
    return num_ranks, num_tables


def check_features(features: NDArray[np.int64], width: int) -> None:
    is_matrix = features.ndim == 2 and features.shape[1] == width
    if not (is_matrix and features.dtype == np.int64 and features.flags.c_contiguous):
        raise ValueError(f"features must be a contiguous int64 array [n, {width}]")


def check_size(what: str, size: int) -> None:
    if not 0 <= size < 2**31:
        raise ValueError(f"{what}: the number {size} must be 0 .. 2^31 - 1")


def _int64_address(what: str, array: Tensor | NDArray[Any], length: int) -> int:
    if isinstance(array, Tensor):
        check_values(what, array, torch.int64, length)
        return array.data_ptr()
    if not (array.shape == (length,) and array.dtype == np.int64 and array.flags.c_contiguous):
        raise ValueError(f"{what} must be a contiguous int64 array [{length}], got {array.dtype} {list(array.shape)}")
    return int(array.ctypes.data)
