"""The requester's dedup on an accelerator: the same distinct keys in the same order as dedup.py finds in host memory.

Keys are sorted, and scans over the sorted list give the distinct ones, their first uses, and the position of every
occurrence. Only the distinct keys return to the host, which routes them; if samples are clustered, positions do, too.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.device.transfer import Download, host_bytes, uploaded, uploaded_inputs
from nestpipe.embedding.bags import split_bags
from nestpipe.embedding.dedup import BatchDedup, DistinctKeys, RequesterDedup, sample_order, split_inputs
from nestpipe.embedding.fused import GroupOccurrences, group_occurrences
from nestpipe.embedding.key_lists import SampleOrder
from nestpipe.embedding.micro_batch_rows import RowOrder, UsedRows, find_used_rows
from nestpipe.embedding.packed import PackedBatch, PackedKeys, SampleLayout
from nestpipe.kernels.keys.owners import owners_of
from nestpipe.kernels.keys.runs import Runs, SortedKeys, mark_runs, number_runs


def dedup_on_device(packed: PackedBatch, device: torch.device) -> BatchDedup:
    """Finds the distinct keys of a batch and splits it into micro-batches. Waits for the device."""
    found = [_FoundKeys.of(keys, device) for keys in packed.groups]
    num_distinct = Download([keys.num_distinct for keys in found]).wait()  # one wait for all groups
    groups = [_order_keys(*pair, packed.world_size) for pair in zip(found, num_distinct, strict=True)]
    lists = Download([list_ for group in groups for list_ in (group.keys, group.counts)])
    order, layouts = packed.order, packed.layouts
    if order is None:
        order = _clustered(packed, groups, lists)
        layouts = [SampleLayout.of(keys, order, packed.num_threads, host_bytes(device)) for keys in packed.groups]
    used = [find_used_rows(group.row_order, layout, order.sizes) for group, layout in zip(groups, layouts, strict=True)]
    occurrences = [
        group_occurrences(packed.features.features, keys, layout, rows)
        for keys, layout, rows in zip(packed.groups, layouts, used, strict=True)
    ]
    host_lists = lists.wait()
    dedups = [
        _requester_dedup(keys, host_lists[2 * g], host_lists[2 * g + 1], order, used[g], occurrences[g])
        for g, keys in enumerate(packed.groups)
    ]
    inputs = uploaded_inputs(split_inputs(packed.batch, order), device)
    bags = split_bags(packed.features, packed.batch, order, packed.world_size, packed.num_threads)
    on_device = [uploaded(group, device) for group in bags]
    return BatchDedup(dedups, inputs, order.sizes, packed.batch.weights, packed.has_batch, on_device)


@dataclass(frozen=True)
class _FoundKeys:
    """The runs of equal keys of a group. How many there are, the host does not know yet."""

    keys: SortedKeys
    runs: Runs
    run_numbers: Tensor
    use_numbers: Tensor
    num_distinct: Tensor
    """[tables + 1] distinct keys of all tables before each table, then of all."""
    salts: Tensor

    @staticmethod
    def of(packed: PackedKeys, device: torch.device) -> "_FoundKeys":
        group = packed.group
        num_tables = len(group.tables)
        keys = packed.keys.to(device, non_blocking=True)
        bounds = torch.from_numpy(packed.table_bounds).to(device, non_blocking=True)
        by_key, key_order = keys.sort(stable=True)
        tables = table_order = None
        if packed.tables is not None:
            tables = packed.tables.to(device, non_blocking=True).index_select(0, key_order)
        elif num_tables > 1:
            tables = torch.bucketize(key_order, bounds[1:], right=True, out_int32=True)
            tables = tables.to(torch.int16) if num_tables <= torch.iinfo(torch.int16).max else tables  # sorted faster
        if tables is not None:
            tables, table_order = tables.sort(stable=True)
        sorted_keys = SortedKeys(by_key, key_order, tables, table_order, num_tables)
        runs = mark_runs(sorted_keys)
        run_numbers = runs.is_start.cumsum(0, dtype=torch.int32)
        before = torch.zeros(len(keys) + 1, dtype=torch.int32, device=device)
        use_numbers = torch.cumsum(runs.is_first_use, 0, dtype=torch.int32, out=before[1:])
        num_distinct = before.index_select(0, bounds)
        return _FoundKeys(sorted_keys, runs, run_numbers, use_numbers, num_distinct, group.salts)


@dataclass(frozen=True)
class _OrderedKeys:
    """The distinct keys of a group on the device, by position."""

    keys: Tensor
    counts: Tensor
    """[ranks * tables] distinct keys."""
    row_order: RowOrder


def _order_keys(found: _FoundKeys, num_distinct: Tensor, world_size: int) -> _OrderedKeys:
    """num_distinct: found.num_distinct in host memory."""
    bounds = num_distinct.numpy().astype(np.int64)
    distinct, numbers = number_runs(
        found.keys, found.runs, found.run_numbers, found.use_numbers, int(bounds[-1])
    )  # in order of (table, first use)
    num_keys = found.num_distinct.diff()
    if world_size == 1:
        return _OrderedKeys(distinct, num_keys, RowOrder(numbers, bounds, None, None))
    return _order_by_owner(distinct, numbers, num_keys, bounds, found.salts, world_size)


def _order_by_owner(
    distinct: Tensor, numbers: Tensor, num_keys: Tensor, bounds: NDArray[np.int64], salts: Tensor, world_size: int
) -> _OrderedKeys:
    device, num_tables, num_distinct = distinct.device, len(salts), len(distinct)
    tables = torch.repeat_interleave(torch.arange(num_tables, device=device), num_keys, output_size=num_distinct)
    owners = owners_of(distinct, salts.to(device).index_select(0, tables), world_size)
    sorted_owners, order = owners.sort(stable=True)
    tables = tables.index_select(0, order)
    places = torch.arange(world_size * num_tables + 1, device=device)
    counts = torch.searchsorted(sorted_owners * num_tables + tables, places).diff()
    positions = _with_padding(_inverse(order)).index_select(0, numbers)
    if num_tables == 1:
        return _OrderedKeys(distinct.index_select(0, order), counts, RowOrder(positions, bounds, None, None))
    position_of_row = tables.sort(stable=True).indices
    row_order = RowOrder(positions, bounds, _inverse(position_of_row), position_of_row)
    return _OrderedKeys(distinct.index_select(0, order), counts, row_order)


def _inverse(permutation: Tensor) -> Tensor:
    """Returns the inverse. A sort: scattering takes one too if algorithms have to be deterministic."""
    return permutation.sort().indices


def _with_padding(numbers: Tensor) -> Tensor:
    """Returns numbers of positions, and their number for padding."""
    return torch.cat([numbers, numbers.new_full((1,), len(numbers))])


def _clustered(packed: PackedBatch, groups: list[_OrderedKeys], lists: Download) -> SampleOrder:
    positions = Download([group.row_order.positions for group in groups]).wait()
    host_lists = lists.wait()
    distinct = [
        DistinctKeys(keys.group, keys.jagged, host_lists[2 * g], _counts(keys, host_lists[2 * g + 1]), positions[g])
        for g, keys in enumerate(packed.groups)
    ]
    return sample_order(packed.features, distinct, packed.batch, packed.num_micro_batches, packed.clustering)


def _counts(keys: PackedKeys, counts: Tensor) -> Tensor:
    return counts.to(torch.int32).view(-1, len(keys.group.tables))


def _requester_dedup(
    packed: PackedKeys, keys: Tensor, counts: Tensor, order: SampleOrder, used: UsedRows, occurrences: GroupOccurrences
) -> RequesterDedup:
    return RequesterDedup(
        group=packed.group,
        keys=keys,
        counts=_counts(packed, counts),
        uses=used.uses,
        row_positions=used.row_positions,
        is_first=used.is_first,
        row_counts=used.row_counts,
        row_offsets=used.row_offsets,
        num_samples=order.sizes,
        occurrences=occurrences,
    )
