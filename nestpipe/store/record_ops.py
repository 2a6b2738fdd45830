"""Copying records between arrays, without a store."""

import torch
from torch import Tensor

from nestpipe.store.interface import check_array, check_threads
from nestpipe.store.native import call, pointer


def copy_records(source: Tensor, from_places: Tensor, target: Tensor, to_places: Tensor, num_threads: int = 1) -> None:
    """target[to_places] = source[from_places], in one pass. The arrays do not overlap, to_places are distinct."""
    check_threads(num_threads)
    check_array("source", source, target.dtype, [len(source), target.shape[1]])
    check_array("target", target, source.dtype, [len(target), source.shape[1]])
    for places in (from_places, to_places):
        check_array("places", places, torch.int64, [len(to_places)])
    call(
        "copy_records",
        pointer(source),
        len(source),
        pointer(from_places),
        pointer(target),
        len(target),
        pointer(to_places),
        len(to_places),
        source.shape[1] * source.itemsize,
        num_threads,
    )
