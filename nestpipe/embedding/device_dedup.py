"""The requester's dedup on an accelerator: the same distinct keys in the same order as dedup.py finds in host memory.

Keys are sorted, and scans over the sorted list give the distinct ones, their first uses, and the position of every
occurrence. Only the distinct keys return to the host, which routes them; if samples are clustered, positions do, too.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.device.transfer import Download, host_bytes, uploaded_inputs
from nestpipe.embedding.dedup import BatchDedup, DistinctKeys, RequesterDedup, SampleOrder, sample_order, split_inputs
from nestpipe.embedding.fused import GroupOccurrences, group_occurrences
from nestpipe.embedding.micro_batch_rows import RowOrder, UsedRows, find_used_rows
from nestpipe.embedding.packed import PackedBatch, PackedKeys, SampleLayout
from nestpipe.kernels.keys.owners import owners_of
from nestpipe.kernels.keys.runs import Runs, SortedKeys, mark_runs, number_runs


def dedup_on_device(packed: PackedBatch, device: torch.device) -> BatchDedup:
    """Finds the distinct keys of a batch and splits it into micro-batches. Waits for the device."""
    found = [FoundKeys.of(keys, device) for keys in packed.groups]
    num_distinct = Download([keys.num_distinct for keys in found]).wait()  # one wait for all groups
    pairs = zip(found, num_distinct, strict=True)
    groups = [keys.in_order(number.numpy().astype(np.int64), packed.world_size) for keys, number in pairs]
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
        requester_dedup(keys, host_lists[2 * g], host_lists[2 * g + 1], order, used[g], occurrences[g])
        for g, keys in enumerate(packed.groups)
    ]
    inputs = uploaded_inputs(split_inputs(packed.batch, order), device)
    return BatchDedup(dedups, inputs, order.sizes, packed.batch.weights, packed.has_batch)


@dataclass(frozen=True)
class FoundKeys:
    """The runs of equal keys of a group. How many there are, the host does not know yet."""

    keys: SortedKeys
    runs: Runs
    run_numbers: Tensor
    use_numbers: Tensor
    num_distinct: Tensor
    """[tables + 1] distinct keys of all tables before each table, then of all."""
    salts: Tensor

    @staticmethod
    def of(packed: PackedKeys, device: torch.device) -> "FoundKeys":
        keys = packed.keys.to(device, non_blocking=True)
        bounds = torch.from_numpy(packed.table_bounds).to(device, non_blocking=True)
        tables = None if packed.tables is None else packed.tables.to(device, non_blocking=True)
        return FoundKeys.find(keys, tables, bounds, packed.group.salts)

    @staticmethod
    def find(keys: Tensor, tables: Tensor | None, bounds: Tensor, salts: Tensor, has_rest: bool = False) -> "FoundKeys":
        """tables: [n] table of each key; None if bounds, [tables + 1] first keys of tables, say it. has_rest: keys from
        the last bound on do not count."""
        num_tables = len(salts)
        by_key, key_order = keys.sort(stable=True)
        table_order = None
        if tables is not None:
            tables = tables.index_select(0, key_order)
        elif num_tables > 1 or has_rest:
            tables = torch.bucketize(key_order, bounds[1:], right=True, out_int32=True)
            tables = tables.to(torch.int16) if num_tables <= torch.iinfo(torch.int16).max else tables  # sorted faster
        if tables is not None:
            tables, table_order = tables.sort(stable=True)
        sorted_keys = SortedKeys(by_key, key_order, tables, table_order, num_tables)
        runs = mark_runs(sorted_keys)
        run_numbers = runs.is_start.cumsum(0, dtype=torch.int32)
        before = torch.zeros(len(keys) + 1, dtype=torch.int32, device=keys.device)
        use_numbers = torch.cumsum(runs.is_first_use, 0, dtype=torch.int32, out=before[1:])
        num_distinct = before.index_select(0, bounds)
        return FoundKeys(sorted_keys, runs, run_numbers, use_numbers, num_distinct, salts)

    def in_order(self, bounds: NDArray[np.int64], world_size: int) -> "OrderedKeys":
        """Returns the distinct keys by position. bounds: num_distinct in host memory; its last number may be larger,
        and then keys from the real one on mean nothing."""
        distinct, numbers = number_runs(
            self.keys, self.runs, self.run_numbers, self.use_numbers, int(bounds[-1])
        )  # in order of (table, first use)
        if world_size == 1:
            return OrderedKeys(distinct, self.num_distinct.diff(), RowOrder(numbers, bounds, None, None))
        return _order_by_owner(distinct, numbers, self.num_distinct, bounds, self.salts, world_size)


@dataclass(frozen=True)
class OrderedKeys:
    """The distinct keys of a group on the device, by position."""

    keys: Tensor
    counts: Tensor
    """[ranks * tables] distinct keys."""
    row_order: RowOrder


def _order_by_owner(
    distinct: Tensor, numbers: Tensor, ends: Tensor, bounds: NDArray[np.int64], salts: Tensor, world_size: int
) -> OrderedKeys:
    """ends: [tables + 1] distinct keys of all tables before each table, then of all."""
    device, num_tables, num_distinct = distinct.device, len(salts), len(distinct)
    tables = torch.bucketize(torch.arange(num_distinct, device=device), ends[1:].long(), right=True)
    salts = torch.cat([salts, salts.new_zeros(1)]).to(device)  # one more for keys that mean nothing
    owners = owners_of(distinct, salts.index_select(0, tables), world_size)
    owners = torch.where(tables < num_tables, owners, world_size)
    sorted_owners, order = owners.sort(stable=True)
    tables = tables.index_select(0, order)
    places = torch.arange(world_size * num_tables + 1, device=device)
    counts = torch.searchsorted(sorted_owners * num_tables + tables, places).diff()
    positions = _with_padding(_inverse(order)).index_select(0, numbers)
    if num_tables == 1:
        return OrderedKeys(distinct.index_select(0, order), counts, RowOrder(positions, bounds, None, None))
    position_of_row = tables.sort(stable=True).indices
    row_order = RowOrder(positions, bounds, _inverse(position_of_row), position_of_row)
    return OrderedKeys(distinct.index_select(0, order), counts, row_order)


def _inverse(permutation: Tensor) -> Tensor:
    """Returns the inverse. A sort: scattering takes one too if algorithms have to be deterministic."""
    return permutation.sort().indices


def _with_padding(numbers: Tensor) -> Tensor:
    """Returns numbers of positions, and their number for padding."""
    return torch.cat([numbers, numbers.new_full((1,), len(numbers))])


def _clustered(packed: PackedBatch, groups: list[OrderedKeys], lists: Download) -> SampleOrder:
    positions = Download([group.row_order.positions for group in groups]).wait()
    host_lists = lists.wait()
    distinct = [
        DistinctKeys(keys.group, keys.jagged, host_lists[2 * g], _counts(keys, host_lists[2 * g + 1]), positions[g])
        for g, keys in enumerate(packed.groups)
    ]
    return sample_order(packed.features, distinct, packed.batch, packed.num_micro_batches, packed.clustering)


def _counts(keys: PackedKeys, counts: Tensor) -> Tensor:
    return counts.to(torch.int32).view(-1, len(keys.group.tables))


def requester_dedup(
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
