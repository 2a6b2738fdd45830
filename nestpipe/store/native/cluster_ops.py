"""Clustering: distributes the samples of a batch over parts, so that samples which share keys come together."""

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from nestpipe.store.interface import check_array, check_integer
from nestpipe.store.native.library import NativeBatch, NativeKeyLists, call, pointer

NATIVE_METHODS = ("spectral", "minhash")
MOST_PARTS = 4096


def cluster(
    lists: Sequence[tuple[Tensor, Tensor]],
    num_distinct: int,
    cost: Tensor,
    num_parts: int,
    method: str = "spectral",
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns the samples part by part, ascending within a part, and the offsets of the parts [num_parts + 1].

    `lists`: for each feature, the number of every key among the distinct keys of the batch (0 .. num_distinct - 1;
    negative for padding) and the offsets of its samples. `cost`: cost of each sample, above 0. See
    csrc/include/nestpipe.h.
    """
    if method not in NATIVE_METHODS:
        raise ValueError(f"method {method!r} is none of {', '.join(NATIVE_METHODS)}")
    check_integer("num_parts", num_parts, 1, MOST_PARTS)
    check_integer("num_distinct", num_distinct, 0, 2**31)
    check_integer("seed", seed, 0, 2**64 - 1)
    check_array("cost", cost, torch.float64, [None])
    num_samples = len(cost)
    for index, offsets in lists:
        check_array("index", index, torch.int64, [None])
        check_array("offsets", offsets, torch.int64, [num_samples + 1])
    native = [NativeKeyLists(pointer(index), pointer(offsets), len(index)) for index, offsets in lists]
    features = (NativeKeyLists * len(native))(*native)
    batch = NativeBatch(features, pointer(cost), num_samples, num_distinct, len(lists))
    order = torch.empty(num_samples, dtype=torch.int64)
    part_offsets = torch.empty(num_parts + 1, dtype=torch.int64)
    number = NATIVE_METHODS.index(method)
    call("cluster", byref(batch), num_parts, number, seed, pointer(order), pointer(part_offsets))
    return order, part_offsets
