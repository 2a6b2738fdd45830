"""The operations in plain torch, with the same order of every sum: the kernels' oracle.

They run on an accelerator without Triton. Products and sums are separate operations, as in the kernels, so that nothing
is fused and the bits are the same. Only torch's square root may differ in the last bit on a CPU.
"""

import torch
from torch import Tensor

LANES = 1024
"""Columns of a row whose squares are summed separately, before their sums are."""


def copy_rows(source: Tensor, from_places: Tensor | None, target: Tensor, to_places: Tensor | None) -> None:
    rows = source if from_places is None else source.index_select(0, from_places.to(source.device))
    rows = rows.to(target.device)
    if to_places is None:
        target[: len(rows)].copy_(rows)
    else:
        target.index_copy_(0, to_places.to(target.device), rows[: len(to_places)])


def add_rows(
    target: Tensor,
    places: Tensor | None,
    source: Tensor,
    is_first: Tensor | None,
    limit: float,
    exceeds: Tensor | None,
) -> None:
    source = source.to(target.device)
    before = target[: len(source)] if places is None else target.index_select(0, places)
    total = before + source if is_first is None else torch.where(is_first[:, None], source, before + source)
    if places is None:
        target[: len(source)].copy_(total)
    else:
        target.index_copy_(0, places, total)
    if exceeds is not None:
        exceeds |= ~(total.abs() <= limit).all()


def find_large(rows: Tensor, limit: float, exceeds: Tensor) -> None:
    low, high = rows.aminmax()
    exceeds |= ~((low >= -limit) & (high <= limit))  # a NaN appears in both bounds, and compares false


def sum_runs(
    values: Tensor,
    order: Tensor | None,
    weights: Tensor | None,
    weight_places: Tensor | None,
    bounds: tuple[Tensor, Tensor] | None,
    out: Tensor,
    num_runs: int,
    limits: tuple[int, int | None],
    spacing: tuple[int, int] | None,
    places: Tensor | None,
) -> None:
    """Writes to out[r] the sum of run r, entries bounds[0][r] .. bounds[1][r] - 1, one after another.

    All runs advance together. Runs shorter or longer than `limits` are left out.
    """
    runs = torch.arange(num_runs, device=values.device)
    first, lengths = (runs, torch.ones_like(runs)) if bounds is None else (bounds[0], bounds[1] - bounds[0])
    shortest, longest = limits
    if shortest > 0 or longest is not None:
        fits = lengths >= shortest
        runs = (fits if longest is None else fits & (lengths <= longest)).nonzero().flatten()
        first, lengths = first[runs], lengths[runs]
    rows = values if places is None else values.index_select(0, places)
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    totals = values.new_zeros(len(runs), values.shape[1])
    unfinished = torch.arange(len(runs), device=values.device)
    i = 0
    while len(unfinished := unfinished[lengths[unfinished] > i]) > 0:
        totals[unfinished] += _entries(padded, order, weights, weight_places, first[unfinished] + i, spacing)
        i += 1
    out.index_copy_(0, runs, totals)


def count_pieces(starts: Tensor, ends: Tensor, size: int, counts: Tensor) -> None:
    """Writes the number of pieces of each segment; 0 if it is no longer than one."""
    lengths = ends - starts
    counts.copy_(torch.where(lengths > size, (lengths + size - 1) // size, 0))


def find_pieces(starts: Tensor, ends: Tensor, offsets: Tensor, size: int, bounds: Tensor) -> None:
    """Writes the first entry and the end of each piece; zeros for pieces beyond the last. offsets: of the pieces of
    each segment."""
    numbers = torch.arange(bounds.shape[1], device=starts.device)
    owners = torch.searchsorted(offsets[1:], numbers, right=True).clamp_(max=len(starts) - 1)
    begin = starts[owners] + size * (numbers - offsets[owners])
    end = torch.minimum(begin + size, ends[owners])
    bounds.copy_(torch.where(numbers < offsets[-1], torch.stack([begin, end]), 0))


def _entries(
    padded: Tensor,
    order: Tensor | None,
    weights: Tensor | None,
    weight_places: Tensor | None,
    entries: Tensor,
    spacing: tuple[int, int] | None,
) -> Tensor:
    places = entries if order is None else order[entries]
    if spacing is not None:
        spaced = places // spacing[0] * spacing[1] + places % spacing[0]
        places = torch.where(places == len(padded) - 1, places, spaced)  # padding stays what it is
    if weights is None:
        return padded[places]
    weight = weights[entries if weight_places is None else weight_places[entries]]
    return torch.where(places == len(padded) - 1, 0.0, weight)[:, None] * padded[places]


def sgd(rows: Tensor, gradient: Tensor, slots: Tensor | None, is_masked: Tensor | None, lr: float) -> None:
    _assign(rows, slots, _at(rows, slots) - _rounded(lr, rows) * gradient, is_masked)


def adagrad(
    rows: Tensor,
    state: Tensor,
    gradient: Tensor,
    slots: Tensor | None,
    is_masked: Tensor | None,
    lr: float,
    eps: float,
) -> None:
    sums = _at(state, slots) + gradient * gradient
    change = _rounded(lr, rows) * gradient / _divisor(sums, eps)
    _assign(rows, slots, _at(rows, slots) - change, is_masked)
    _assign(state, slots, sums, is_masked)


def rowwise_adagrad(
    rows: Tensor,
    state: Tensor,
    gradient: Tensor,
    slots: Tensor | None,
    is_masked: Tensor | None,
    lr: float,
    eps: float,
) -> None:
    squares = sum_of_squares(gradient)
    # If the divisor were a number, torch would multiply by its inverse on some devices.
    sums = _at(state, slots) + squares / torch.full_like(squares, rows.shape[1])
    change = _rounded(lr, rows) * gradient / _divisor(sums, eps)
    _assign(rows, slots, _at(rows, slots) - change, is_masked)
    _assign(state, slots, sums, is_masked)


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Returns [n, 1]: sums over every LANES-th column, then of neighbours, then of sums of neighbours, and so on."""
    width = gradient.shape[1]
    lanes = min(1 << (width - 1).bit_length(), LANES)
    sums = gradient.new_zeros(len(gradient), lanes)
    for part in gradient.split(lanes, dim=1):
        sums[:, : part.shape[1]] += part * part
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums


def adam(
    rows: Tensor,
    state: Tensor,
    gradient: Tensor,
    slots: Tensor | None,
    is_masked: Tensor | None,
    beta1: float,
    beta2: float,
    step_size: float,
    eps: float,
) -> None:
    first, second = state.split(rows.shape[1], dim=1)
    # 1 - beta would lose digits in float32.
    add1, add2 = _rounded(1 - beta1, rows), _rounded(1 - beta2, rows)
    new_first = _rounded(beta1, rows) * _at(first, slots) + add1 * gradient
    new_second = _rounded(beta2, rows) * _at(second, slots) + add2 * (gradient * gradient)
    change = _rounded(step_size, rows) * new_first / _divisor(new_second, eps)
    _assign(rows, slots, _at(rows, slots) - change, is_masked)
    _assign(first, slots, new_first, is_masked)
    _assign(second, slots, new_second, is_masked)


def _divisor(sums: Tensor, eps: float) -> Tensor:
    """Returns sqrt(sums) + eps, or infinity where that is zero, so that the row does not change there."""
    total = sums.sqrt() + _rounded(eps, sums)
    return torch.where(total == 0, torch.inf, total)


def _rounded(number: float, array: Tensor) -> float:
    """Rounds a number to the array's dtype, as the kernels and the native library do before they use it."""
    return torch.tensor(number, dtype=array.dtype).item()


def _at(array: Tensor, slots: Tensor | None) -> Tensor:
    """Returns the rows in these slots, or all rows without slots."""
    return array if slots is None else array.index_select(0, slots)


def _assign(array: Tensor, slots: Tensor | None, values: Tensor, is_masked: Tensor | None) -> None:
    if is_masked is not None:
        values = torch.where(is_masked.bool(), _at(array, slots), values)
    if slots is None:
        array.copy_(values)
    else:
        array.index_copy_(0, slots, values)
