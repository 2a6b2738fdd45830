"""Sums over segments of entries, in a fixed order, whatever the device does at the same time.

An entry names a row of `values`, and may have a weight; a segment is a stretch of entries. They are added up one after
another, PIECE entries at a time; then the sums of these pieces, one after another. So a segment of many pieces, say the
gradients of a hot key, is the work of many programs, next to millions of short segments. Which segments are long must
be known when the kernels are launched, without asking the device: it is found out on the host, where offsets are made.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.kernels.checks import check_numbers, check_reachable, check_rows, check_shape, check_written
from nestpipe.kernels.dispatch import runs_triton
from nestpipe.store import group_by_row

PIECE = 128
"""entries that are added up one after another"""


@dataclass(frozen=True)
class Pieces:
    """The pieces of those segments that have several."""

    starts: Tensor
    """[num_pieces] first entry of each"""
    ends: Tensor
    segments: Tensor
    """[num_long] which segments they are of"""
    offsets: Tensor
    """[num_long + 1]: long segment i has pieces offsets[i]:offsets[i + 1]"""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Pieces":
        return Pieces(*(function(array) for array in (self.starts, self.ends, self.segments, self.offsets)))


@dataclass(frozen=True)
class Segments:
    num_segments: int
    order: Tensor | None = None
    """[n] the row of `values` of each entry; len(values) stands for padding, no row. None: entry j has row j"""
    offsets: Tensor | None = None
    """[num_segments + 1]: segment s has entries offsets[s]:offsets[s + 1]. None: entry s only"""
    weight_places: Tensor | None = None
    """[n] where the weight of each entry is. None: entry j has weight j"""
    pieces: Pieces | None = None
    """None: no segment has more than one"""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Segments":
        arrays = self.order, self.offsets, self.weight_places
        order, offsets, weight_places = (None if array is None else function(array) for array in arrays)
        pieces = None if self.pieces is None else self.pieces.map(function)
        return Segments(self.num_segments, order, offsets, weight_places, pieces)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Segments":
        return self.map(lambda array: array.to(device, non_blocking=non_blocking))


def make_segments(order: Tensor | None, offsets: Tensor, weight_places: Tensor | None = None) -> Segments:
    """From arrays in host memory."""
    check_numbers("offsets", offsets, len(offsets))
    if order is not None:
        check_numbers("order", order, int(offsets[-1]))
    return Segments(len(offsets) - 1, order, offsets, weight_places, _pieces(offsets))


def one_each(order: Tensor) -> Segments:
    """Segments of one entry each: a gather."""
    return Segments(len(order), order)


def _pieces(offsets: Tensor) -> Pieces | None:
    segments = (offsets.diff() > PIECE).nonzero().flatten()
    if len(segments) == 0:
        return None
    first, end = offsets[segments], offsets[segments + 1]
    counts = (end - first + PIECE - 1) // PIECE
    piece_offsets = _offsets(counts)
    of = torch.repeat_interleave(counts)
    starts = first[of] + PIECE * (torch.arange(len(of)) - piece_offsets[of])
    return Pieces(starts, torch.minimum(starts + PIECE, end[of]), segments, piece_offsets)


def by_row(index: Tensor, offsets: Tensor | None, num_rows: int, has_weights: bool = False) -> Segments:
    """The way back: for each row the samples that have it, in the order of its occurrences. Padding is left out.

    From arrays in host memory: occurrence i is of row index[i], or of none where that is num_rows; offsets as in
    Segments, of samples.
    """
    check_numbers("index", index, len(index))
    row_offsets, occurrences, samples = group_by_row(index, offsets, num_rows, with_occurrences=has_weights)
    return Segments(num_rows, samples, row_offsets, occurrences, _pieces(row_offsets))


def check_index(index: Tensor, num_rows: int) -> None:
    """A device does not say what is out of range: it reads something else."""
    check_numbers("index", index, len(index))
    if len(index) > 0 and not (int(index.min()) >= 0 and int(index.max()) <= num_rows):
        raise ValueError(f"index has values outside 0 .. {num_rows}, the rows and, one beyond them, padding")


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def sum_segments(values: Tensor, segments: Segments, weights: Tensor | None, out: Tensor) -> None:
    """out[s] = the sum over the entries of segment s of weight * row. A segment without entries gets zeros.

    weights: [n] of the rows' dtype; None: all are 1. The order is the module's, and a sum starts from zero.
    """
    _check(values, segments, weights, out)
    if segments.num_segments == 0:
        return
    rows_of = values, segments.order, weights, segments.weight_places
    bounds = None if segments.offsets is None else (segments.offsets[:-1], segments.offsets[1:])
    pieces = segments.pieces
    _sum_runs(*rows_of, bounds, out, None, segments.num_segments, None if pieces is None else PIECE)
    if pieces is None:
        return
    sums = torch.empty(len(pieces.starts), values.shape[1], dtype=values.dtype, device=values.device)
    _sum_runs(*rows_of, (pieces.starts, pieces.ends), sums, None, len(sums), None)
    bounds = pieces.offsets[:-1], pieces.offsets[1:]
    _sum_runs(sums, None, None, None, bounds, out, pieces.segments, len(pieces.segments), None)


def _sum_runs(
    values: Tensor,
    order: Tensor | None,
    weights: Tensor | None,
    weight_places: Tensor | None,
    bounds: tuple[Tensor, Tensor] | None,
    out: Tensor,
    to_places: Tensor | None,
    num_runs: int,
    longest: int | None,
) -> None:
    """out[to_places[r]] = the sum of run r, entries bounds[0][r] .. bounds[1][r] - 1, one after another."""
    if runs_triton(values):
        from nestpipe.kernels.rows.triton_segments import sum_runs
    else:
        from nestpipe.kernels.rows.reference import sum_runs
    sum_runs(values, order, weights, weight_places, bounds, out, to_places, num_runs, longest)


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
