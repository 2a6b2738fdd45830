"""What the dense model receives: rows at the occurrences of keys."""

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
    """[m, dim] rows of the micro-batch, those of the feature's table"""
    index: Tensor
    """[n] row index: the row of each key; m where the key is padding, which gets zeros"""
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
        if isinstance(self.occurrences, DeviceOccurrences):
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
        self,
        features: FeatureGroups,
        groups: Sequence[RequesterDedup],
        micro_batch: int,
        rows: Sequence[Tensor],
    ) -> None:
        """rows: by group, the rows of the micro-batch, table after table."""
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
        """[num_samples, sum of dims]: torch.cat of pooled features, all of them unless named, but in one pass."""
        names = list(self if names is None else names)
        return pool([self._occurrences(name) for name in names], [self.table_rows(name) for name in names])

    def table_rows(self, name: str) -> Tensor:
        """[m, dim] the micro-batch's rows of the feature's table"""
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
        part, made = self._part(name), self._on_device(name)
        occurrences = made if made is not None else Occurrences(part.index)
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
        made = self._groups[self._features.places[name][0]].occurrences
        return made[self._micro_batch][name] if made else None

    def _occurrences(self, name: str) -> Occurrences | DeviceOccurrences:
        feature = self._feature(name)
        if not isinstance(feature, Pooled):
            raise ValueError(f"feature {name!r} is a sequence: only pooled features stand side by side")
        made = self._on_device(name)
        if made is not None:
            return made
        part = self._part(name)
        return Occurrences(part.index, part.offsets, pooling_weights(feature, part, len(self.table_rows(name))))


def pooling_weights(feature: Pooled, part: FeaturePart, num_rows: int) -> Tensor | None:
    """Returns what each row of a sample is multiplied by, in host memory. The weights of a mean add up to 1; padding
    has none."""
    if feature.mode != "mean":
        return part.weights
    present = (part.index < num_rows).to(feature.table.dtype)
    counted = present if part.weights is None else present * part.weights
    lengths = part.offsets.diff()
    samples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    total = torch.zeros(len(lengths), dtype=counted.dtype).index_add_(0, samples, counted)
    return counted / torch.where(total == 0, 1.0, total)[samples]


def with_occurrences(features: FeatureGroups, batch: BatchDedup) -> BatchDedup:
    """Adds what kernels need to know of the occurrences, made in host memory."""
    return replace(batch, groups=[_with_occurrences(features.features, group) for group in batch.groups])


def _with_occurrences(features: Mapping[str, Feature], dedup: RequesterDedup) -> RequesterDedup:
    made: list[dict[str, DeviceOccurrences]] = []
    for i in range(len(dedup.num_samples)):
        made.append({})
        for f, name in enumerate(dedup.group.features):
            feature, part = features[name], dedup.part(i, f)
            num_rows = int(dedup.row_counts[i, dedup.group.feature_tables[f]])
            offsets, weights = None, None
            if isinstance(feature, Pooled):
                offsets, weights = part.offsets, pooling_weights(feature, part, num_rows)
            made[i][name] = make_occurrences(part.index, offsets, weights, num_rows, not dedup.group.frozen)
    return replace(dedup, occurrences=made)
