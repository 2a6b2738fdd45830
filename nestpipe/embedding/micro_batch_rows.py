"""The rows that each micro-batch uses, found on a device: rows of its distinct keys, table after table."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.device.transfer import Download
from nestpipe.embedding.packed import SampleLayout


@dataclass(frozen=True)
class RowOrder:
    """Positions of a group, and the order (table, position) of the rows of micro-batches."""

    positions: Tensor
    """[occurrences] position of each key; their number for padding."""
    table_bounds: NDArray[np.int64]
    """[tables + 1] first row of each table in the order of rows, then their number."""
    row_of_position: Tensor | None
    """[positions] row of each position; None if they are the same."""
    position_of_row: Tensor | None

    @property
    def num_positions(self) -> int:
        return int(self.table_bounds[-1])


@dataclass(frozen=True)
class UsedRows:
    """The rows of the micro-batches of one group. Occurrences are in the order of SampleLayout."""

    rows: Tensor
    """[occurrences] row of each key among those of its micro-batch; their number for padding."""
    bounds: Tensor
    """SampleLayout.bounds on the device."""
    segments: Tensor | None
    """[occurrences] segment of each; None if each segment has one occurrence."""
    sources: Tensor | None
    """[occurrences] place of each in the order of the batch; None if that is the same."""
    row_positions: Tensor
    is_first: Tensor
    uses: Tensor
    row_counts: NDArray[np.int64]
    row_offsets: list[int]


def find_used_rows(order: RowOrder, layout: SampleLayout, num_samples: list[int]) -> UsedRows:
    """Numbers the rows of each micro-batch. num_samples: of each micro-batch."""
    device = order.positions.device
    if layout.is_one_each:
        bounds = torch.arange(len(layout.bounds), device=device)
    else:
        bounds = layout.bounds.to(device, non_blocking=True)
    segments = None if layout.is_one_each else _segments(bounds, len(order.positions))
    if len(num_samples) == 1:
        return _all_rows(order, bounds, segments)
    return _split_rows(order, layout, bounds, segments, len(num_samples))


def _segments(bounds: Tensor, num_occurrences: int) -> Tensor:
    """Returns the segment of each occurrence."""
    return torch.bucketize(torch.arange(num_occurrences, device=bounds.device), bounds[1:], right=True)


def _all_rows(order: RowOrder, bounds: Tensor, segments: Tensor | None) -> UsedRows:
    """One micro-batch has all rows."""
    device, number = order.positions.device, order.num_positions
    positions = order.position_of_row
    return UsedRows(
        rows=_rows_of(order, order.positions),
        bounds=bounds,
        segments=segments,
        sources=None,
        row_positions=torch.arange(number, device=device) if positions is None else positions,
        is_first=torch.ones(number, dtype=torch.bool, device=device),
        uses=torch.ones(number, 1, dtype=torch.uint8),
        row_counts=np.diff(order.table_bounds)[None],
        row_offsets=[0, number],
    )


def _rows_of(order: RowOrder, positions: Tensor) -> Tensor:
    """Returns the rows of positions, in the order of rows."""
    if order.row_of_position is None:
        return positions
    rows = torch.cat([order.row_of_position, positions.new_full((1,), order.num_positions)])
    return rows.index_select(0, positions)


def _split_rows(
    order: RowOrder, layout: SampleLayout, bounds: Tensor, segments: Tensor | None, num_parts: int
) -> UsedRows:
    device, number, num_occurrences = order.positions.device, order.num_positions, len(order.positions)
    assert layout.sources is not None
    occurrences = torch.arange(num_occurrences, device=device)
    sources = layout.sources.to(device, non_blocking=True)
    if segments is not None:
        sources = sources.index_select(0, segments) + occurrences - bounds.index_select(0, segments)
    num_features = (len(layout.block_bounds) - 1) // num_parts
    part_ends = torch.from_numpy(layout.block_bounds[num_features::num_features].copy()).to(device)
    parts = torch.bucketize(occurrences, part_ends, right=True)
    rows = _rows_of(order, order.positions.index_select(0, sources))
    # Row r of all is used by part p if is_used[p, r]. A column for padding follows the rows.
    is_used = torch.zeros(num_parts, number + 1, dtype=torch.uint8, device=device)
    is_used.view(-1).index_fill_(0, parts * (number + 1) + rows, 1)
    before = _used_before(is_used)
    is_used = is_used[:, :number]
    ends = before.index_select(1, torch.from_numpy(order.table_bounds).to(device))
    lists = Download([ends.flatten(), _bits(is_used, order).flatten()])
    # The number of used rows up to a row is the number of the row in its part; padding comes after all of them.
    numbers = before.view(-1).index_select(0, parts * (number + 1) + rows)
    used_parts, used_rows = is_used.nonzero(as_tuple=True)
    is_first = is_used.cumsum(0)[used_parts, used_rows] == 1
    host_ends, uses = lists.wait()
    row_counts = np.diff(host_ends.view(num_parts, len(order.table_bounds)).numpy(), axis=1)
    return UsedRows(
        rows=numbers,
        bounds=bounds,
        segments=segments,
        sources=sources,
        row_positions=used_rows if order.position_of_row is None else order.position_of_row[used_rows],
        is_first=is_first,
        uses=uses.view(number, -(-num_parts // 8)),
        row_counts=row_counts,
        row_offsets=[0, *np.cumsum(row_counts.sum(1)).tolist()],
    )


def _used_before(is_used: Tensor) -> Tensor:
    """Returns for each row, [parts, rows], the number of used rows before it in its part."""
    # One long list: a device scans few long rows with as many of its processors.
    before = torch.zeros(is_used.numel() + 1, dtype=torch.int64, device=is_used.device)
    torch.cumsum(is_used.view(-1), 0, out=before[1:])
    before = before[:-1].view(is_used.shape)
    return before - before[:, :1]


def _bits(is_used: Tensor, order: RowOrder) -> Tensor:
    """Returns the uses of each position, [positions, bytes]."""
    by_position = is_used if order.row_of_position is None else is_used.index_select(1, order.row_of_position)
    bits = [(by_position[p] << (p % 8)) for p in range(len(by_position))]
    uses = [torch.stack(bits[first : first + 8]).sum(0, dtype=torch.uint8) for first in range(0, len(bits), 8)]
    return torch.stack(uses, dim=1)
