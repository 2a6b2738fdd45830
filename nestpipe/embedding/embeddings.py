"""What the dense model receives: rows placed at the occurrences of keys."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nestpipe.embedding.pooling import Occurrences, pool
from nestpipe.embedding.request import Placed
from nestpipe.embedding.table import Feature, Pooled


@dataclass(frozen=True)
class SequenceEmbedding:
    """A jagged sequence of rows: sample s has values[offsets[s]:offsets[s + 1]]."""

    rows: Tensor
    """[m, dim] distinct rows of the micro-batch"""
    index: Tensor
    """[n] row of each key; m where the key is padding, which gets zeros"""
    offsets: Tensor
    """[num_samples + 1]"""

    @cached_property
    def values(self) -> Tensor:
        """[n, dim]"""
        return pool([Occurrences(self.index)], [self.rows])

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def padded(self, length: int) -> Tensor:
        """[num_samples, length, dim]: the first `length` rows of each sample, zeros behind them."""
        places = torch.arange(length, device=self.index.device)
        inside = places < self.lengths[:, None]
        where = torch.where(inside, self.offsets[:-1, None] + places, 0)
        padding = len(self.rows)
        index = torch.where(inside, self.index[where], padding) if len(self.index) else torch.full_like(where, padding)
        return pool([Occurrences(index.flatten())], [self.rows]).view(*index.shape, -1)


class Embeddings(Mapping[str, "SequenceEmbedding | Tensor"]):
    """By feature: a SequenceEmbedding, or a [num_samples, dim] tensor for a pooled one."""

    def __init__(
        self, features: Mapping[str, Feature], placed: Mapping[str, Placed], leaves: Mapping[str, Tensor]
    ) -> None:
        self._features = features
        self._placed = placed
        self._leaves = leaves
        self._values: dict[str, SequenceEmbedding | Tensor] = {}

    def __getitem__(self, name: str) -> "SequenceEmbedding | Tensor":
        if name not in self._values:
            self._values[name] = self._value(self._feature(name), name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def side_by_side(self, names: Iterable[str] | None = None) -> Tensor:
        """[num_samples, sum of dims]: torch.cat of pooled features, all of them unless named, but in one pass."""
        names = list(self if names is None else names)
        return pool([self._occurrences(name) for name in names], [self._leaf(name) for name in names])

    def _value(self, feature: Feature, name: str) -> "SequenceEmbedding | Tensor":
        if isinstance(feature, Pooled):
            return self.side_by_side([name])
        return SequenceEmbedding(self._leaf(name), self._placed[name].index, self._placed[name].offsets)

    def _feature(self, name: str) -> Feature:
        if name not in self._features:
            raise KeyError(f"there is no feature {name!r}; there are {sorted(self._features)}")
        return self._features[name]

    def _leaf(self, name: str) -> Tensor:
        return self._leaves[self._feature(name).table.name]

    def _occurrences(self, name: str) -> Occurrences:
        feature, placed, leaf = self._feature(name), self._placed[name], self._leaf(name)
        if not isinstance(feature, Pooled):
            raise ValueError(f"feature {name!r} is a sequence: only pooled features stand side by side")
        weights = None if placed.weights is None else placed.weights.to(leaf.dtype)
        if feature.mode == "mean":
            weights = _mean_weights(placed, weights, leaf)
        return Occurrences(placed.index, placed.offsets, weights)


def _mean_weights(placed: Placed, weights: Tensor | None, leaf: Tensor) -> Tensor:
    """Weights whose sum is 1 in each sample; padding has none."""
    present = (placed.index < len(leaf)).to(leaf.dtype)
    counted = present if weights is None else present * weights
    lengths = placed.offsets.diff()
    samples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    total = torch.zeros(len(lengths), dtype=leaf.dtype).index_add_(0, samples, counted)
    return counted / torch.where(total == 0, 1.0, total)[samples]
