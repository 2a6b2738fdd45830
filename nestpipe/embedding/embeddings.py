"""What the dense model receives: rows placed at the occurrences of keys."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator
from nestpipe.device.transfer import uploaded
from nestpipe.embedding.pooling import Occurrences, pool
from nestpipe.embedding.request import Placed, Request
from nestpipe.embedding.table import Feature, Pooled
from nestpipe.kernels.pooling import DeviceOccurrences, make_occurrences


@dataclass(frozen=True)
class SequenceEmbedding:
    """A jagged sequence of rows: sample s has values[offsets[s]:offsets[s + 1]]."""

    rows: Tensor
    """[m, dim] distinct rows of the micro-batch"""
    index: Tensor
    """[n] row of each key; m where the key is padding, which gets zeros"""
    offsets: Tensor
    """[num_samples + 1]"""
    host_offsets: Tensor
    """the same, in host memory"""
    occurrences: Occurrences | DeviceOccurrences
    """the same as kernels need it"""

    @cached_property
    def values(self) -> Tensor:
        """[n, dim]"""
        return pool([self.occurrences], [self.rows])

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    @cached_property
    def host_lengths(self) -> list[int]:
        """The same, without waiting for a device."""
        lengths: list[int] = self.host_offsets.diff().tolist()
        return lengths

    def padded(self, length: int) -> Tensor:
        """[num_samples, length, dim]: the first `length` rows of each sample, zeros behind them."""
        if is_accelerator(self.index.device):
            return self._scattered(length)
        places = torch.arange(length)
        inside = places < self.lengths[:, None]
        where = torch.where(inside, self.offsets[:-1, None] + places, 0)
        padding = len(self.rows)
        index = torch.where(inside, self.index[where], padding) if len(self.index) else torch.full_like(where, padding)
        return pool([Occurrences(index.flatten())], [self.rows]).view(*index.shape, -1)

    def _scattered(self, length: int) -> Tensor:
        """Each value to its place, so that backward has nothing to add up; what is too far back, behind all of them."""
        num_samples, device = len(self.offsets) - 1, self.index.device
        samples = torch.repeat_interleave(
            torch.arange(num_samples, device=device), self.lengths, output_size=len(self.index)
        )
        places = torch.arange(len(self.index), device=device) - self.offsets.index_select(0, samples)
        where = torch.where(places < length, samples * length + places, num_samples * length)
        placed = self.values.new_zeros(num_samples * length + 1, self.rows.shape[1]).index_copy(0, where, self.values)
        return placed[:-1].view(num_samples, length, -1)


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
        placed = self._placed[name]
        occurrences = placed.occurrences or Occurrences(placed.index)
        return SequenceEmbedding(self._leaf(name), placed.index, placed.offsets, placed.host_offsets, occurrences)

    def _feature(self, name: str) -> Feature:
        if name not in self._features:
            raise KeyError(f"there is no feature {name!r}; there are {sorted(self._features)}")
        return self._features[name]

    def _leaf(self, name: str) -> Tensor:
        return self._leaves[self._feature(name).table.name]

    def _occurrences(self, name: str) -> Occurrences | DeviceOccurrences:
        feature, placed = self._feature(name), self._placed[name]
        if not isinstance(feature, Pooled):
            raise ValueError(f"feature {name!r} is a sequence: only pooled features stand side by side")
        if placed.occurrences is not None:
            return placed.occurrences
        return Occurrences(placed.index, placed.offsets, weights_of(feature, placed, len(self._leaf(name))))


def weights_of(feature: Pooled, placed: Placed, num_rows: int) -> Tensor | None:
    """What each row of a sample is multiplied by, in host memory. Those of a mean add up to 1; padding has none."""
    dtype = feature.table.dtype
    weights = None if placed.weights is None else placed.weights.to(dtype)
    if feature.mode != "mean":
        return weights
    present = (placed.index < num_rows).to(dtype)
    counted = present if weights is None else present * weights
    lengths = placed.offsets.diff()
    samples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    total = torch.zeros(len(lengths), dtype=dtype).index_add_(0, samples, counted)
    return counted / torch.where(total == 0, 1.0, total)[samples]


def on_device(features: Mapping[str, Feature], request: Request, device: torch.device) -> Request:
    """With what the model is given, and where its rows lie, on the device. Keys stay in host memory."""
    return uploaded(_with_occurrences(features, request), device) if is_accelerator(device) else request


def _with_occurrences(features: Mapping[str, Feature], request: Request) -> Request:
    """With what kernels need to know of the occurrences, made in host memory."""
    leaves = {table.table.name: table.leaves for table in request.tables}
    placed: list[dict[str, Placed]] = []
    for i, of_features in enumerate(request.placed):
        placed.append({})
        for name, of in of_features.items():
            feature = features[name]
            num_rows, is_trained = len(leaves[feature.table.name][i]), not feature.table.frozen
            if isinstance(feature, Pooled):
                made = make_occurrences(of.index, of.offsets, weights_of(feature, of, num_rows), num_rows, is_trained)
            else:
                made = make_occurrences(of.index, None, None, num_rows, is_trained)
            placed[i][name] = replace(of, occurrences=made)
    is_alone = all(len(table.counts) == 1 for table in request.tables)  # a world of one: its leaves are its own slots
    tables = [table.with_first_uses() for table in request.tables] if is_alone else request.tables
    return replace(request, tables=tables, placed=placed)
