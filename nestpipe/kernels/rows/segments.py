"""Sums over segments of entries, in a fixed order.

An entry names a row of `values` and may have a weight. A segment is a run of consecutive entries. Entries are summed
one after another, PIECE entries at a time; then the sums of the pieces are added, one after another. Several programs
can therefore share a segment of many pieces, such as the gradients of a hot key.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.kernels.checks import check_numbers, check_reachable, check_rows, check_shape, check_written
from nestpipe.kernels.dispatch import runs_triton

PIECE = 128
"""Entries that are summed one after another."""


@dataclass(frozen=True)
class Pieces:
    """The pieces of those segments that have several."""

    starts: Tensor
    """First entry of each piece, [num_pieces]. There may be empty pieces at the end."""
    ends: Tensor
    firsts: Tensor
    """Segment s has pieces firsts[s]:lasts[s], none if it is short; [num_segments]."""
    lasts: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Pieces":
        return Pieces(*(function(array) for array in (self.starts, self.ends, self.firsts, self.lasts)))


@dataclass(frozen=True)
class Segments:
    """Segments of entries, each of which is a row of `values`."""

    num_segments: int
    order: Tensor | None = None
    """Row of each entry, [n]; len(values) stands for padding, which is no row. None if entry j has row j."""
    offsets: Tensor | None = None
    """Segment s has entries offsets[s]:offsets[s + 1]; [num_segments + 1]. None if segment s has entry s only."""
    ends: Tensor | None = None
    """End of each segment, [num_segments], if the next one does not begin there."""
    weight_places: Tensor | None = None
    """Place of each entry's weight, [n]. None if entry j has weight j."""
    pieces: Pieces | None = None
    """Pieces of long segments; None if no segment has more than one piece."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Segments":
        arrays = self.order, self.offsets, self.ends, self.weight_places
        order, offsets, ends, weight_places = (None if array is None else function(array) for array in arrays)
        pieces = None if self.pieces is None else self.pieces.map(function)
        return Segments(self.num_segments, order, offsets, ends, weight_places, pieces)

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """Returns the first entry and the end of each segment; None if segment s has entry s only."""
        if self.offsets is None:
            return None
        return self.offsets[: self.num_segments], self.offsets[1:] if self.ends is None else self.ends

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Segments":
        return self.map(lambda array: array.to(device, non_blocking=non_blocking))


def make_segments(
    order: Tensor | None, offsets: Tensor, weight_places: Tensor | None = None, longest: int | None = None
) -> Segments:
    """Makes segments from arrays in host memory: segment s has entries offsets[s]:offsets[s + 1]. longest: limit of the
    entries of a segment; None if it is not known."""
    check_numbers("offsets", offsets, len(offsets))
    if order is not None:
        check_numbers("order", order, int(offsets[-1]))
    may_have_long = len(offsets) > 1 and (longest is None or longest > PIECE)
    has_long = may_have_long and int(offsets.diff().max()) > PIECE
    pieces = make_pieces(offsets[:-1], offsets[1:], int(offsets[-1])) if has_long else None
    return Segments(len(offsets) - 1, order, offsets, None, weight_places, pieces)


def one_each(order: Tensor) -> Segments:
    """Returns segments of one entry each, whose sums are a gather."""
    return Segments(len(order), order)


def make_pieces(starts: Tensor, ends: Tensor, num_entries: int) -> Pieces:
    """Cuts long segments into pieces. Waits for no device: the number of pieces is bounded by that of the entries."""
    if runs_triton(starts):
        from nestpipe.kernels.rows.triton_pieces import count_pieces, find_pieces
    else:
        from nestpipe.kernels.rows.reference import count_pieces, find_pieces
    counts, offsets = torch.empty_like(starts), torch.zeros(len(starts) + 1, dtype=torch.int64, device=starts.device)
    count_pieces(starts, ends, PIECE, counts)
    torch.cumsum(counts, 0, out=offsets[1:])
    most_pieces = 2 * (num_entries // PIECE)  # a long segment has at most one piece that is not full
    bounds = torch.empty(2, most_pieces, dtype=torch.int64, device=starts.device)
    if most_pieces > 0:
        find_pieces(starts, ends, offsets, PIECE, bounds)
    return Pieces(bounds[0], bounds[1], offsets[:-1], offsets[1:])


def sum_segments(
    values: Tensor,
    segments: Segments,
    weights: Tensor | None,
    out: Tensor,
    spacing: tuple[int, int] | None = None,
    places: Tensor | None = None,
) -> None:
    """Writes to out[s] the sum of weight * row over the entries of segment s, or zeros if it has no entries.

    weights: [n] in the rows' dtype; None if all are 1. A sum starts from zero and runs in the order of the module.
    spacing: (size, distance) if rows lie in groups of `size`, one group in every `distance` rows of values.
    places: [m] row i of the segments is values[places[i]]; None if it is values[i].
    """
    _check(values, segments, weights, out, places)
    if segments.num_segments == 0:
        return
    if runs_triton(values):
        from nestpipe.kernels.rows.triton_segments import sum_runs
    else:
        from nestpipe.kernels.rows.reference import sum_runs
    entries = values, segments.order, weights, segments.weight_places
    pieces = segments.pieces
    limits = (0, None) if pieces is None else (0, PIECE)
    sum_runs(*entries, segments.bounds, out, segments.num_segments, limits, spacing, places)
    if pieces is None or len(pieces.starts) == 0:
        return
    sums = torch.empty(len(pieces.starts), values.shape[1], dtype=values.dtype, device=values.device)
    sum_runs(*entries, (pieces.starts, pieces.ends), sums, len(sums), (0, None), spacing, places)
    bounds = pieces.firsts, pieces.lasts
    sum_runs(sums, None, None, None, bounds, out, segments.num_segments, (1, None), None, None)


def _check(values: Tensor, segments: Segments, weights: Tensor | None, out: Tensor, places: Tensor | None) -> None:
    check_rows({"values": values, "out": out})
    check_written("out", out)
    check_shape("out", out, segments.num_segments, values.shape[1])
    if weights is not None:
        _check_weights(weights, values.dtype, segments)
    if places is not None:
        check_numbers("places", places, len(places))
    check_reachable({"values": values, "order": segments.order, "weights": weights, "out": out, "places": places})


def _check_weights(weights: Tensor, dtype: torch.dtype, segments: Segments) -> None:
    entries = segments.order if segments.weight_places is None else None
    is_one_each = entries is None or weights.shape == entries.shape
    if weights.dtype != dtype or not weights.is_contiguous() or not is_one_each:
        raise ValueError(
            f"weights are {weights.dtype} of shape {list(weights.shape)}, must be contiguous {dtype}, one for an entry"
        )
