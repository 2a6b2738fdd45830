"""The keys of a group's features as native calls take them, and the order of a batch's samples."""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.cluster import in_order
from nestpipe.embedding.group import TableGroup


def contiguous_keys(group: TableGroup, batch: Batch) -> list[Jagged]:
    """Returns the keys of each feature of a group, in arrays that native calls can read."""
    return [_contiguous(batch.keys[name]) for name in group.features]


def _contiguous(jagged: Jagged) -> Jagged:
    if jagged.values.is_contiguous() and jagged.offsets.is_contiguous():
        return jagged
    return Jagged(jagged.values.contiguous(), jagged.offsets.contiguous(), jagged.weights)


def feature_key_lists(group: TableGroup, jagged: list[Jagged]) -> NDArray[np.int64]:
    """Returns the keys of each feature as native calls take them."""
    features = group.feature_keys.copy()
    features[:, 0] = [lists.values.data_ptr() for lists in jagged]
    features[:, 1] = [lists.values.numel() for lists in jagged]
    return features


def feature_sample_lists(group: TableGroup, jagged: list[Jagged]) -> NDArray[np.int64]:
    """Returns the samples of each feature as native calls take them."""
    features = np.empty((len(jagged), 3), dtype=np.int64)
    features[:, 0] = [lists.offsets.data_ptr() for lists in jagged]
    features[:, 1] = [lists.values.numel() for lists in jagged]
    features[:, 2] = group.feature_tables
    return features


def outside_error(group: TableGroup, jagged: list[Jagged], feature: int, occurrence: int) -> ValueError:
    """Returns the error for a key that its table does not have."""
    table, lists = group.tables[int(group.feature_tables[feature])], jagged[feature]
    sample = int(torch.searchsorted(lists.offsets, occurrence, right=True)) - 1
    assert table.num_keys is not None
    return ValueError(
        f"feature {group.features[feature]!r}, sample {sample}: key {int(lists.values[occurrence])} is outside "
        f"0 .. {table.num_keys - 1}, the keys of table {table.name!r} (num_keys = {table.num_keys})"
    )


def group_weights(group: TableGroup, jagged: list[Jagged]) -> Tensor:
    """Returns the weights of all occurrences of a group, 1 where a feature has none."""
    ones = torch.ones(max(lists.values.numel() for lists in jagged), dtype=group.dtype)
    parts = [
        ones[: lists.values.numel()] if lists.weights is None else lists.weights.to(group.dtype) for lists in jagged
    ]
    return torch.cat(parts)


class SampleOrder:
    """The samples of a batch in the order of its micro-batches."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.sizes = [len(part) for part in parts]
        self.samples = torch.cat(parts) if len(parts) > 1 else None
        """Permutation of the samples; None if they keep their order."""
        self.part_offsets = torch.tensor([0, *self.sizes]).cumsum(0)

    @staticmethod
    @lru_cache(maxsize=8)
    def in_order(num_samples: int, num_parts: int) -> "SampleOrder":
        """Returns an order that batches of one size share."""
        return SampleOrder(in_order(num_samples, num_parts))

    @property
    def num_parts(self) -> int:
        return len(self.sizes)
