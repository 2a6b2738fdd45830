"""The input of the dense model: embeddings, which are rows at the occurrences of keys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nestpipe.embedding.dedup import BatchDedup, FeaturePart, RequesterDedup
from nestpipe.embedding.group import FeatureGroups
from nestpipe.embedding.pooling import Occurrences, pool
from nestpipe.embedding.table import Feature, Pooled
from nestpipe.kernels.rows.pooling import DeviceOccurrences, make_occurrences


@dataclass(frozen=True)
class SequenceEmbedding:
    """A jagged sequence of rows: sample s has values[offsets[s]:offsets[s + 1]]."""

    rows: Tensor
    """[m, dim] the micro-batch's rows of the feature's table."""
    index: Tensor
    """[n] row of each key; m for padding, whose values are zeros."""
    offsets: Tensor
    """[num_samples + 1] start of each sample."""
    host_offsets: Tensor
    """`offsets` in host memory."""
    occurrences: Occurrences | DeviceOccurrences
    """`index` in the form that kernels need."""

    @cached_property
    def values(self) -> Tensor:
        """Returns the row of each key, [n, dim]."""
        return pool([self.occurrences], [self.rows])

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    @cached_property
    def host_lengths(self) -> list[int]:
        """Returns `lengths` as a list, without waiting for a device."""
        lengths: list[int] = self.host_offsets.diff().tolist()
        return lengths

    def padded(self, length: int) -> Tensor:
        """Returns the first `length` rows of each sample, followed by zeros: [num_samples, length, dim]."""
        if isinstance(self.occurrences, DeviceOccurrences):
            return self._scattered(length)
        columns = torch.arange(length)
        inside = columns < self.lengths[:, None]
        keys = torch.where(inside, self.offsets[:-1, None] + columns, 0)
        padding = len(self.rows)
        index = torch.where(inside, self.index[keys], padding) if len(self.index) else torch.full_like(keys, padding)
        return pool([Occurrences(index.flatten())], [self.rows]).view(*index.shape, -1)

    def _scattered(self, length: int) -> Tensor:
        """Copies each value to its place, so that backward need not sum. Values beyond `length` share a spare row."""
        num_samples, device = len(self.offsets) - 1, self.index.device
        samples = torch.repeat_interleave(
            torch.arange(num_samples, device=device), self.lengths, output_size=len(self.index)
        )
        columns = torch.arange(len(self.index), device=device) - self.offsets.index_select(0, samples)
        targets = torch.where(columns < length, samples * length + columns, num_samples * length)
        padded = self.values.new_zeros(num_samples * length + 1, self.rows.shape[1]).index_copy(0, targets, self.values)
        return padded[:-1].view(num_samples, length, -1)


class Embeddings(Mapping[str, "SequenceEmbedding | Tensor"]):
    """Embeddings by feature: a SequenceEmbedding, or a [num_samples, dim] tensor for a pooled feature."""

    def __init__(
        self,
        features: FeatureGroups,
        groups: Sequence[RequesterDedup],
        micro_batch: int,
        rows: Sequence[Tensor],
    ) -> None:
        """rows: the rows of the micro-batch by group, table after table."""
        self._features = features
        self._groups = groups
        self._micro_batch = micro_batch
        self._rows = rows
        self._table_rows: dict[int, tuple[Tensor, ...]] = {}
        self._values: dict[str, SequenceEmbedding | Tensor] = {}

    def __getitem__(self, name: str) -> "SequenceEmbedding | Tensor":
        if name not in self._values:
            self._values[name] = self._value(self._feature(name), name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features.features)

    def __len__(self) -> int:
        return len(self._features.features)

    def side_by_side(self, names: Iterable[str] | None = None) -> Tensor:
        """Returns torch.cat of pooled features, all unless named, in one pass: [num_samples, sum of dims]."""
        names = list(self if names is None else names)
        return pool([self._occurrences(name) for name in names], [self.table_rows(name) for name in names])

    def table_rows(self, name: str) -> Tensor:
        """Returns the micro-batch's rows of the feature's table, [m, dim]."""
        self._feature(name)
        g, f = self._features.places[name]
        if g not in self._table_rows:
            sizes = self._groups[g].row_counts[self._micro_batch].tolist()
            split: tuple[Tensor, ...] = self._rows[g].split(sizes)
            self._table_rows[g] = split if len(sizes) > 1 else (self._rows[g],)
        return self._table_rows[g][int(self._groups[g].group.feature_tables[f])]

    def _value(self, feature: Feature, name: str) -> "SequenceEmbedding | Tensor":
        if isinstance(feature, Pooled):
            return self.side_by_side([name])
        part, on_device = self._part(name), self._on_device(name)
        occurrences = on_device if on_device is not None else Occurrences(part.index)
        return SequenceEmbedding(self.table_rows(name), part.index, part.offsets, part.host_offsets, occurrences)

    def _feature(self, name: str) -> Feature:
        features = self._features.features
        if name not in features:
            raise KeyError(f"there is no feature {name!r}; there are {sorted(features)}")
        return features[name]

    def _part(self, name: str) -> FeaturePart:
        g, f = self._features.places[name]
        return self._groups[g].part(self._micro_batch, f)

    def _on_device(self, name: str) -> DeviceOccurrences | None:
        occurrences = self._groups[self._features.places[name][0]].occurrences
        return occurrences[self._micro_batch][name] if occurrences else None

    def _occurrences(self, name: str) -> Occurrences | DeviceOccurrences:
        feature = self._feature(name)
        if not isinstance(feature, Pooled):
            raise ValueError(f"feature {name!r} is a sequence: only pooled features stand side by side")
        on_device = self._on_device(name)
        if on_device is not None:
            return on_device
        part = self._part(name)
        return Occurrences(part.index, part.offsets, pooling_weights(feature, part, len(self.table_rows(name))))


def pooling_weights(feature: Pooled, part: FeaturePart, num_rows: int) -> Tensor | None:
    """Returns the factor of each row of a sample, in host memory; None for all 1. The weights of a mean add up to 1;
    padding has weight 0."""
    if feature.mode != "mean":
        return part.weights
    present = (part.index < num_rows).to(feature.table.dtype)
    weights = present if part.weights is None else present * part.weights
    lengths = part.offsets.diff()
    samples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    total = torch.zeros(len(lengths), dtype=weights.dtype).index_add_(0, samples, weights)
    return weights / torch.where(total == 0, 1.0, total)[samples]


def with_occurrences(features: FeatureGroups, batch: BatchDedup) -> BatchDedup:
    """Adds the occurrences in the form that device kernels need, still in host memory."""
    return replace(batch, groups=[_with_occurrences(features.features, group) for group in batch.groups])


def _with_occurrences(features: Mapping[str, Feature], dedup: RequesterDedup) -> RequesterDedup:
    occurrences: list[dict[str, DeviceOccurrences]] = []
    for i in range(len(dedup.num_samples)):
        occurrences.append({})
        for f, name in enumerate(dedup.group.features):
            feature, part = features[name], dedup.part(i, f)
            num_rows = int(dedup.row_counts[i, dedup.group.feature_tables[f]])
            offsets, weights = None, None
            if isinstance(feature, Pooled):
                offsets, weights = part.offsets, pooling_weights(feature, part, num_rows)
            occurrences[i][name] = make_occurrences(part.index, offsets, weights, num_rows, not dedup.group.frozen)
    return replace(dedup, occurrences=occurrences)
