"""Copies and additions of rows by index, and a check of their elements."""

import math

import torch
from torch import Tensor

from nestpipe.kernels.checks import check_numbers, check_reachable, check_rows, check_shape, check_written
from nestpipe.kernels.dispatch import runs_triton
from nestpipe.kernels.rows import reference


def copy_rows(source: Tensor, from_places: Tensor | None, target: Tensor, to_places: Tensor | None) -> None:
    """Copies source[from_places[i]] to target[to_places[i]].

    Places that are None stand for row i; if both are None, all rows of source are copied. The arrays do not overlap,
    and to_places are distinct. Arrays and places may be in device memory or in pinned host memory, which the device
    reads or writes over its link; at least one of them is in device memory.
    """
    num_rows = len(next((p for p in (to_places, from_places) if p is not None), source))
    check_rows({"source": source, "target": target})
    if to_places is None:  # with places, target may be a message in units smaller than a row
        check_written("target", target)
    check_shape("target", target, len(target), source.shape[1])
    check_numbers("from_places", from_places, num_rows)
    check_numbers("to_places", to_places, num_rows)
    if num_rows > len(source) and from_places is None:
        raise ValueError(f"from_places is None, but there are {num_rows} to_places for {len(source)} rows of source")
    if num_rows > len(target) and to_places is None:
        raise ValueError(f"to_places is None, but target has {len(target)} rows only, for {num_rows}")
    if num_rows == 0:
        return
    if not runs_triton(source, target):
        reference.copy_rows(source, from_places, target, to_places)
        return
    check_reachable({"source": source, "target": target, "from_places": from_places, "to_places": to_places})
    from nestpipe.kernels.rows import triton_copy

    triton_copy.copy_rows(source, from_places, target, to_places, num_rows)


def add_rows(
    target: Tensor,
    places: Tensor | None,
    source: Tensor,
    is_first: Tensor | None = None,
    limit: float = math.inf,
    exceeds: Tensor | None = None,
) -> None:
    """Adds source[i] to target[places[i]]. The places are distinct; None stands for row i.

    is_first: [n] bool, rows that replace the row at their place instead of being added to it; None if there are none.
    exceeds: one int32, which becomes 1 if a sum is NaN or larger in magnitude than `limit`.
    """
    check_rows({"target": target, "source": source})
    check_written("target", target)
    check_shape("source", source, len(source), target.shape[1])
    check_numbers("places", places, len(source))
    if places is None and len(source) > len(target):
        raise ValueError(f"places is None, but target has {len(target)} rows only, for {len(source)}")
    if is_first is not None and (is_first.dtype != torch.bool or is_first.shape != (len(source),)):
        raise ValueError(f"is_first is {is_first.dtype} of shape {list(is_first.shape)}, must be bool [{len(source)}]")
    if len(source) == 0:
        return
    if not runs_triton(target):
        reference.add_rows(target, places, source, is_first, limit, exceeds)
        return
    check_reachable({"target": target, "places": places, "source": source})
    from nestpipe.kernels.rows import triton_copy

    triton_copy.add_rows(target, places, source, is_first, limit, exceeds)


def find_large(rows: Tensor, limit: float, exceeds: Tensor) -> None:
    """Sets `exceeds`, one int32, to 1 if an element is NaN or larger in magnitude than `limit`."""
    check_rows({"rows": rows})
    if rows.numel() == 0:
        return
    if not runs_triton(rows):
        reference.find_large(rows, limit, exceeds)
        return
    check_reachable({"rows": rows, "exceeds": exceeds})
    from nestpipe.kernels.rows import triton_copy

    triton_copy.find_large(rows, limit, exceeds)
