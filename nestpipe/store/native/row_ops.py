"""Copies, adds and sums rows between arrays, without a temporary copy.

Arrays are tensors [n, dim] in host memory; there may be gaps between their rows. The arrays of a call do not overlap.
"""

import math

import torch
from torch import Tensor

from nestpipe.store.native.library import call, pointer
from nestpipe.store.native.plan_ops import check_values

_DTYPES = {torch.float32: 0, torch.float64: 1}


def copy_rows(
    source: Tensor,
    from_places: Tensor | None,
    target: Tensor,
    to_places: Tensor | None,
    num_threads: int = 1,
    *,
    from_unit: int | None = None,
    to_unit: int | None = None,
) -> None:
    """Copies rows: target[to_places] = source[from_places]. None stands for all rows, in order. to_places are distinct.

    `from_unit`, `to_unit`: unit of the places, in bytes; the distance between rows if not given. It may be smaller than
    a row.
    """
    _check_rows("source", source)
    _check_rows("target", target)
    if source.dtype is not target.dtype or source.shape[1] != target.shape[1]:
        raise ValueError(
            f"rows of source and target differ: {source.shape[1]} of {source.dtype}, "
            f"{target.shape[1]} of {target.dtype}"
        )
    _check_writable("target", target)
    _copy(
        source.data_ptr(),
        _extent(source),
        _stride(source) if from_unit is None else from_unit,
        from_places,
        target.data_ptr(),
        _extent(target),
        _stride(target) if to_unit is None else to_unit,
        to_places,
        _num_rows(from_places, source, to_places, target),
        source.shape[1] * source.itemsize,
        num_threads,
    )


def write_rows(
    source: Tensor,
    from_places: Tensor | None,
    message: Tensor,
    unit_bytes: int,
    message_places: Tensor | None,
    num_threads: int = 1,
) -> None:
    """Copies rows `from_places` of `source`, or all, to the message. Each row starts at byte message_places *
    unit_bytes; without places, one row starts every unit."""
    _check_rows("source", source)
    check_values("message", message, torch.uint8)
    _copy(
        source.data_ptr(),
        _extent(source),
        _stride(source),
        from_places,
        message.data_ptr(),
        message.nbytes,
        unit_bytes,
        message_places,
        _num_rows(from_places, source, message_places, None),
        source.shape[1] * source.itemsize,
        num_threads,
    )


def read_rows(
    message: Tensor,
    unit_bytes: int,
    message_places: Tensor | None,
    target: Tensor,
    to_places: Tensor | None,
    num_threads: int = 1,
) -> None:
    """Copies rows of the message, as write_rows lays them out, to rows `to_places` of `target`, or to all."""
    _check_rows("target", target)
    _check_writable("target", target)
    check_values("message", message, torch.uint8)
    _copy(
        message.data_ptr(),
        message.nbytes,
        unit_bytes,
        message_places,
        target.data_ptr(),
        _extent(target),
        _stride(target),
        to_places,
        _num_rows(to_places, target, message_places, None),
        target.shape[1] * target.itemsize,
        num_threads,
    )


def add_rows(
    target: Tensor,
    places: Tensor | None,
    source: Tensor,
    is_first: Tensor | None = None,
    limit: float = math.inf,
    exceeds: Tensor | None = None,
    num_threads: int = 1,
) -> None:
    """Adds rows: target[places] += source, or target[places] = 0 + source where `is_first`. Places are distinct; None
    stands for all rows, in order.

    `exceeds`: int32 [1], set to 1 if a result is NaN or its absolute value is above `limit`; otherwise left as it is.
    """
    count = len(source)
    _check_rows("target", target)
    _check_rows("source", source)
    _check_same_rows("target", target, source)
    _check_writable("target", target)
    _check_places("places", places, count)
    if places is None and len(target) != count:
        raise ValueError(f"target has {len(target)} rows, source {count}, and there are no places")
    if is_first is not None:
        check_values("is_first", is_first, torch.bool, count)
    if exceeds is not None:
        check_values("exceeds", exceeds, torch.int32, 1)
    call(
        "add_rows",
        target.data_ptr(),
        _extent(target),
        _stride(target),
        pointer(places),
        source.data_ptr(),
        _extent(source),
        _stride(source),
        pointer(is_first),
        count,
        source.shape[1],
        _DTYPES[source.dtype],
        limit,
        pointer(exceeds),
        num_threads,
    )


def check_rows(rows: Tensor, limit: float, exceeds: Tensor, num_threads: int = 1) -> None:
    """Sets `exceeds`, int32 [1], to 1 if an element is NaN or its absolute value is above `limit`."""
    _check_rows("rows", rows)
    _check_same_rows("rows", rows, rows)
    check_values("exceeds", exceeds, torch.int32, 1)
    call(
        "check_rows",
        rows.data_ptr(),
        _extent(rows),
        _stride(rows),
        *rows.shape,
        _DTYPES[rows.dtype],
        limit,
        pointer(exceeds),
        num_threads,
    )


def sum_rows(values: Tensor, order: Tensor | None, offsets: Tensor, out: Tensor, num_threads: int = 1) -> None:
    """Sums segments of rows: out[s] = ((0 + values[order[o]]) + values[order[o + 1]]) + ..., for o = offsets[s] ..
    offsets[s + 1] - 1 in that order; zeros for an empty segment. The default of `order` is 0, 1, 2, ..."""
    num_segments = len(out)
    _check_rows("values", values)
    _check_rows("out", out)
    _check_same_rows("out", out, values)
    _check_writable("out", out)
    check_values("offsets", offsets, torch.int64, num_segments + 1)
    if order is not None:
        check_values("order", order, torch.int64)
    call(
        "sum_rows",
        values.data_ptr(),
        _extent(values),
        _stride(values),
        pointer(order),
        len(values) if order is None else len(order),
        offsets.data_ptr(),
        num_segments,
        values.shape[1],
        _DTYPES[values.dtype],
        out.data_ptr(),
        _extent(out),
        _stride(out),
        num_threads,
    )


def _copy(
    source: int,
    source_bytes: int,
    source_stride: int,
    from_places: Tensor | None,
    target: int,
    target_bytes: int,
    target_stride: int,
    to_places: Tensor | None,
    count: int,
    row_bytes: int,
    num_threads: int,
) -> None:
    _check_places("from_places", from_places, count)
    _check_places("to_places", to_places, count)
    call(
        "copy_rows",
        source,
        source_bytes,
        source_stride,
        pointer(from_places),
        target,
        target_bytes,
        target_stride,
        pointer(to_places),
        count,
        row_bytes,
        num_threads,
    )


def _num_rows(places: Tensor | None, rows: Tensor, other_places: Tensor | None, other_rows: Tensor | None) -> int:
    """Returns the number of rows to copy: the number of places, or of all rows without places."""
    if places is not None:
        return places.shape[0]
    if other_places is not None:
        return other_places.shape[0]
    if other_rows is not None and len(other_rows) != len(rows):
        raise ValueError(f"source has {len(rows)} rows, target {len(other_rows)}, and there are no places")
    return rows.shape[0]


def _check_rows(what: str, rows: Tensor) -> None:
    if rows.dim() != 2 or not rows.is_cpu or (rows.stride(1) != 1 and rows.shape[1] != 1):
        raise ValueError(f"{what} must be an array of dense rows in host memory, got {_description(rows)}")


def _check_same_rows(what: str, rows: Tensor, others: Tensor) -> None:
    if rows.dtype is not others.dtype or rows.dtype not in _DTYPES or rows.shape[1] != others.shape[1]:
        raise ValueError(
            f"{what} must have rows like {_description(others)} of float32 or 64, got {_description(rows)}"
        )


def _check_writable(what: str, rows: Tensor) -> None:
    if rows.requires_grad:
        raise ValueError(f"{what} must not require a gradient: it is overwritten; pass {what}.detach()")


def _check_places(what: str, places: Tensor | None, count: int) -> None:
    if places is not None:
        check_values(what, places, torch.int64, count)


def _description(rows: Tensor) -> str:
    return f"{rows.dtype} {list(rows.shape)} with strides {rows.stride()} on {rows.device}"


def _stride(rows: Tensor) -> int:
    """Returns the bytes from one row to the next."""
    return (rows.stride(0) if rows.shape[0] > 1 else max(rows.shape[1], 1)) * rows.itemsize


def _extent(rows: Tensor) -> int:
    """Returns the bytes from the start of the first row to the end of the last."""
    num_rows, dim = rows.shape
    return 0 if num_rows == 0 else ((num_rows - 1) * rows.stride(0) + dim) * rows.itemsize
