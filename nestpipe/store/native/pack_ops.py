"""Operations that pack a batch for an accelerator. Each function is one native call, with several threads."""

from ctypes import byref, c_int64

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.store.native.library import call, pointer
from nestpipe.store.native.plan_ops import (
    FEATURE_KEYS_WIDTH,
    FEATURE_SAMPLES_WIDTH,
    check_features,
    check_size,
    check_values,
)


def pack_keys(
    features: NDArray[np.int64], num_tables: int, keys: Tensor | None, tables: Tensor | None, num_threads: int = 1
) -> tuple[int, int] | None:
    """Writes the keys of all features, and the table of each, `num_tables` for padding. Arguments as of `dedup`.

    keys, tables: None if they are not written.

    Returns the first feature with a key outside of its limit and the first such occurrence in it, and then nothing is
    written; None if there is none.
    """
    check_features(features, FEATURE_KEYS_WIDTH)
    num_occurrences = int(features[:, 1].sum())
    check_size("features", num_occurrences)
    if keys is not None:
        check_values("keys", keys, torch.int64, num_occurrences)
    if tables is not None:
        check_values("tables", tables, torch.int16, num_occurrences)
    outside = (c_int64 * 2)()
    lists = features.ctypes.data, len(features), num_tables
    call("pack_keys", *lists, pointer(keys), pointer(tables), byref(outside), num_threads)
    return None if outside[0] < 0 else (outside[0], outside[1])


def copy_arrays(arrays: NDArray[np.int64], target: Tensor, num_threads: int = 1) -> None:
    """Copies arrays into `target`, an array of bytes. `arrays`: [n, 3], for each its address, its bytes and the place
    of its first byte in the target; the caller keeps them alive."""
    check_features(arrays, 3)
    check_values("target", target, torch.uint8)
    call("copy_arrays", arrays.ctypes.data, len(arrays), pointer(target), len(target), num_threads)


def find_ranges(arrays: NDArray[np.int64], num_threads: int = 1) -> list[bool]:
    """Returns for each array of int64 whether it is 0, 1, 2 and so on. `arrays`: as of copy_arrays."""
    check_features(arrays, 3)
    is_range = torch.empty(len(arrays), dtype=torch.bool)
    call("find_ranges", arrays.ctypes.data, len(arrays), pointer(is_range), num_threads)
    found: list[bool] = is_range.tolist()
    return found


def lay_out(
    features: NDArray[np.int64],
    samples: Tensor | None,
    part_offsets: Tensor,
    num_samples: int,
    bounds: Tensor,
    sources: Tensor | None,
    num_threads: int = 1,
) -> int:
    """Writes where samples lie if occurrences are ordered by (part, feature, sample). Arguments as of `split`.

    `bounds`: [features * samples + 1] the first occurrence of each (part, feature, sample), then their number.
    `sources`: [features * samples] the same occurrence in the order of the batch, or None. Returns the most keys that a
    sample has of one feature.
    """
    check_features(features, FEATURE_SAMPLES_WIDTH)
    check_values("part_offsets", part_offsets, torch.int64)
    num_segments = len(features) * num_samples
    check_size("features * samples", num_segments)
    check_values("bounds", bounds, torch.int64, num_segments + 1)
    if samples is not None:
        check_values("samples", samples, torch.int64, num_samples)
    if sources is not None:
        check_values("sources", sources, torch.int64, num_segments)
    if len(part_offsets) < 2:
        raise ValueError("part_offsets must have at least two entries")
    longest = c_int64()
    call(
        "lay_out",
        features.ctypes.data,
        len(features),
        pointer(samples),
        pointer(part_offsets),
        len(part_offsets) - 1,
        num_samples,
        pointer(bounds),
        pointer(sources),
        byref(longest),
        num_threads,
    )
    return longest.value
