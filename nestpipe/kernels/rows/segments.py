"""Sums over segments of entries, in a fixed order.

An entry names a row of `values` and may have a weight. A segment is a run of consecutive entries. Entries are summed
one after another, PIECE entries at a time; then the sums of the pieces are added, one after another. Several programs
can therefore share a segment of many pieces, such as the gradients of a hot key. The launch
must know which segments are long without waiting for the device, so the host finds them when it makes the offsets.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.kernels.checks import check_numbers, check_reachable, check_rows, check_shape, check_written
from nestpipe.kernels.dispatch import runs_triton
from nestpipe.store import group_by_row

PIECE = 128
"""Entries that are summed one after another."""


@dataclass(frozen=True)
class Pieces:
    """The pieces of those segments that have several."""

    starts: Tensor
    """First entry of each piece, [num_pieces]."""
    ends: Tensor
    segments: Tensor
    """Segments that have several pieces, [num_long]."""
    offsets: Tensor
    """Long segment i has pieces offsets[i]:offsets[i + 1]; [num_long + 1]."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Pieces":
        return Pieces(*(function(array) for array in (self.starts, self.ends, self.segments, self.offsets)))


@dataclass(frozen=True)
class Segments:
    """Segments of entries, each of which is a row of `values`."""

    num_segments: int
    order: Tensor | None = None
    """Row of each entry, [n]; len(values) stands for padding, which is no row. None if entry j has row j."""
    offsets: Tensor | None = None
    """Segment s has entries offsets[s]:offsets[s + 1]; [num_segments + 1]. None if segment s has entry s only."""
    weight_places: Tensor | None = None
    """Place of each entry's weight, [n]. None if entry j has weight j."""
    pieces: Pieces | None = None
    """Pieces of long segments; None if no segment has more than one piece."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Segments":
        arrays = self.order, self.offsets, self.weight_places
        order, offsets, weight_places = (None if array is None else function(array) for array in arrays)
        pieces = None if self.pieces is None else self.pieces.map(function)
        return Segments(self.num_segments, order, offsets, weight_places, pieces)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Segments":
        return self.map(lambda array: array.to(device, non_blocking=non_blocking))


def make_segments(order: Tensor | None, offsets: Tensor, weight_places: Tensor | None = None) -> Segments:
    """Makes segments from arrays in host memory."""
    check_numbers("offsets", offsets, len(offsets))
    if order is not None:
        check_numbers("order", order, int(offsets[-1]))
    return Segments(len(offsets) - 1, order, offsets, weight_places, _pieces(offsets))


def one_each(order: Tensor) -> Segments:
    """Returns segments of one entry each, whose sums are a gather."""
    return Segments(len(order), order)


def _pieces(offsets: Tensor) -> Pieces | None:
    segments = (offsets.diff() > PIECE).nonzero().flatten()
    if len(segments) == 0:
        return None
    first, end = offsets[segments], offsets[segments + 1]
    counts = (end - first + PIECE - 1) // PIECE
    piece_offsets = _offsets(counts)
    owners = torch.repeat_interleave(counts)  # the long segment of each piece
    starts = first[owners] + PIECE * (torch.arange(len(owners)) - piece_offsets[owners])
    return Pieces(starts, torch.minimum(starts + PIECE, end[owners]), segments, piece_offsets)


def by_row(index: Tensor, offsets: Tensor | None, num_rows: int, has_weights: bool = False) -> Segments:
    """Makes the segments of a backward: for each row its samples, in the order of occurrences, without padding.

    The arrays are in host memory. Occurrence i has row index[i], or is padding if that is num_rows. offsets are those
    of the samples, as in Segments.
    """
    check_numbers("index", index, len(index))
    row_offsets, occurrences, samples = group_by_row(index, offsets, num_rows, with_occurrences=has_weights)
    return Segments(num_rows, samples, row_offsets, occurrences, _pieces(row_offsets))


def check_index(index: Tensor, num_rows: int) -> None:
    """Checks that rows are in range: a device would read other memory without an error."""
    check_numbers("index", index, len(index))
    if len(index) > 0 and not (int(index.min()) >= 0 and int(index.max()) <= num_rows):
        raise ValueError(f"index has values outside 0 .. {num_rows}, the rows and, one beyond them, padding")


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def sum_segments(values: Tensor, segments: Segments, weights: Tensor | None, out: Tensor) -> None:
    """Writes to out[s] the sum of weight * row over the entries of segment s, or zeros if it has no entries.

    weights: [n] in the rows' dtype; None if all are 1. A sum starts from zero and runs in the order of the module.
    """
    _check(values, segments, weights, out)
    if segments.num_segments == 0:
        return
    if runs_triton(values):
        from nestpipe.kernels.rows.triton_segments import sum_runs
    else:
        from nestpipe.kernels.rows.reference import sum_runs
    entries = values, segments.order, weights, segments.weight_places
    bounds = None if segments.offsets is None else (segments.offsets[:-1], segments.offsets[1:])
    pieces = segments.pieces
    sum_runs(*entries, bounds, out, None, segments.num_segments, None if pieces is None else PIECE)
    if pieces is None:
        return
    sums = torch.empty(len(pieces.starts), values.shape[1], dtype=values.dtype, device=values.device)
    sum_runs(*entries, (pieces.starts, pieces.ends), sums, None, len(sums), None)
    bounds = pieces.offsets[:-1], pieces.offsets[1:]
    sum_runs(sums, None, None, None, bounds, out, pieces.segments, len(pieces.segments), None)


def _check(values: Tensor, segments: Segments, weights: Tensor | None, out: Tensor) -> None:
    check_rows({"values": values, "out": out})
    check_written("out", out)
    check_shape("out", out, segments.num_segments, values.shape[1])
    if weights is not None:
        _check_weights(weights, values.dtype, segments)
    check_reachable({"values": values, "order": segments.order, "weights": weights, "out": out})


def _check_weights(weights: Tensor, dtype: torch.dtype, segments: Segments) -> None:
    entries = segments.order if segments.weight_places is None else None
    is_one_each = entries is None or weights.shape == entries.shape
    if weights.dtype != dtype or not weights.is_contiguous() or not is_one_each:
        raise ValueError(
            f"weights are {weights.dtype} of shape {list(weights.shape)}, must be contiguous {dtype}, one for an entry"
        )
