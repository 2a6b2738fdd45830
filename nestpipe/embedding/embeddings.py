"""What the dense model receives: rows placed at the occurrences of keys."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from nestpipe.embedding.request import Placed
from nestpipe.embedding.table import Feature, Pooled


@dataclass(frozen=True)
class SequenceEmbedding:
    """A jagged sequence of rows: sample s has values[offsets[s]:offsets[s + 1]]."""

    rows: Tensor
    """[m + 1, dim] distinct rows of the micro-batch, and a row of zeros for padding"""
    index: Tensor
    """[n] row of each key"""
    offsets: Tensor
    """[num_samples + 1]"""

    @cached_property
    def values(self) -> Tensor:
        """[n, dim]"""
        return F.embedding(self.index, self.rows)

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def padded(self, length: int) -> Tensor:
        """[num_samples, length, dim]: the first `length` rows of each sample, zeros behind them."""
        places = torch.arange(length, device=self.index.device)
        inside = places < self.lengths[:, None]
        where = torch.where(inside, self.offsets[:-1, None] + places, 0)
        padding = len(self.rows) - 1
        index = torch.where(inside, self.index[where], padding) if len(self.index) else torch.full_like(where, padding)
        return F.embedding(index, self.rows)


class Embeddings(Mapping[str, "SequenceEmbedding | Tensor"]):
    """By feature: a SequenceEmbedding, or a [num_samples, dim] tensor for a pooled one."""

    def __init__(
        self, features: Mapping[str, Feature], placed: Mapping[str, Placed], leaves: Mapping[str, Tensor]
    ) -> None:
        padded = {name: torch.cat([leaf, leaf.new_zeros(1, leaf.shape[1])]) for name, leaf in leaves.items()}
        self._values = {
            name: _place(feature, placed[name], padded[feature.table.name]) for name, feature in features.items()
        }

    def __getitem__(self, name: str) -> "SequenceEmbedding | Tensor":
        if name not in self._values:
            raise KeyError(f"there is no feature {name!r}; there are {sorted(self._values)}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _place(feature: Feature, placed: Placed, rows: Tensor) -> SequenceEmbedding | Tensor:
    if isinstance(feature, Pooled):
        return _pool(placed, rows, mean=feature.mode == "mean")
    return SequenceEmbedding(rows, placed.index, placed.offsets)


def _pool(placed: Placed, rows: Tensor, mean: bool) -> Tensor:
    weights = None if placed.weights is None else placed.weights.to(rows.dtype)
    pooled = F.embedding_bag(
        placed.index, rows, placed.offsets, mode="sum", include_last_offset=True, per_sample_weights=weights
    )
    if not mean:
        return pooled
    present = (placed.index < len(rows) - 1).to(rows.dtype)
    counted = present if weights is None else present * weights
    samples = torch.repeat_interleave(torch.arange(len(pooled)), placed.offsets.diff())
    total = torch.zeros(len(pooled), dtype=rows.dtype).index_add_(0, samples, counted)
    return pooled / torch.where(total == 0, 1.0, total)[:, None]
