"""The input of the dense model: embeddings, which are rows at the occurrences of keys."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from nestpipe.embedding.bags import Bags
from nestpipe.embedding.dedup import FeaturePart, HostOccurrences, RequesterDedup
from nestpipe.embedding.fused import GroupOccurrences
from nestpipe.embedding.group import FeatureGroups, FeatureSet
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.embedding.pooling import Occurrences, RowsOf, pool
from nestpipe.embedding.table import Feature, Pooled, Table
from nestpipe.embedding.table import Sequence as SequenceFeature
from nestpipe.kernels.rows import pooling as on_device


class SequenceEmbedding(ABC):
    """A jagged sequence of rows: sample s has values[offsets[s]:offsets[s + 1]]."""

    table: Table

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """Returns the micro-batch's rows of the feature's table, [m, dim]."""

    @property
    @abstractmethod
    def index(self) -> Tensor:
        """Returns the row of each key, [n]; m for padding, whose values are zeros."""

    @property
    @abstractmethod
    def offsets(self) -> Tensor:
        """Returns the start of each sample, [num_samples + 1]."""

    @property
    @abstractmethod
    def host_offsets(self) -> Tensor:
        """Returns `offsets` in host memory."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """Returns the row of each key, [n, dim]."""

    @abstractmethod
    def padded(self, length: int) -> Tensor:
        """Returns the first `length` rows of each sample, followed by zeros: [num_samples, length, dim]."""

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    @cached_property
    def host_lengths(self) -> list[int]:
        """Returns `lengths` as a list, without waiting for a device."""
        lengths: list[int] = self.host_offsets.diff().tolist()
        return lengths


class HostSequence(SequenceEmbedding):
    """A sequence of rows in host memory."""

    def __init__(self, table: Table, rows: Tensor, part: FeaturePart) -> None:
        self.table = table
        self._rows = rows
        self._part = part

    @property
    def rows(self) -> Tensor:
        return self._rows

    @property
    def index(self) -> Tensor:
        return self._part.index

    @property
    def offsets(self) -> Tensor:
        return self._part.offsets

    @property
    def host_offsets(self) -> Tensor:
        return self._part.offsets

    @cached_property
    def values(self) -> Tensor:
        return pool([Occurrences(self.index)], [self.rows])

    def padded(self, length: int) -> Tensor:
        columns = torch.arange(length)
        inside = columns < self.lengths[:, None]
        keys = torch.where(inside, self.offsets[:-1, None] + columns, 0)
        padding = len(self.rows)
        index = torch.where(inside, self.index[keys], padding) if len(self.index) else torch.full_like(keys, padding)
        return pool([Occurrences(index.flatten())], [self.rows]).view(*index.shape, self.rows.shape[1])


class DeviceSequence(SequenceEmbedding):
    """A sequence of rows on a device. Everything is made when it is read."""

    def __init__(self, table: Table, embeddings: "Embeddings", name: str) -> None:
        self.table = table
        self._embeddings = embeddings
        self._name = name

    @property
    def rows(self) -> Tensor:
        return self._embeddings.table_rows(self._name)

    @cached_property
    def index(self) -> Tensor:
        return self._embeddings.device_occurrences(self._name).index(*self._embeddings.place(self._name))

    @cached_property
    def offsets(self) -> Tensor:
        return self._embeddings.device_occurrences(self._name).offsets(*self._embeddings.place(self._name))

    @cached_property
    def host_offsets(self) -> Tensor:
        return self._embeddings.device_occurrences(self._name).host_offsets(*self._embeddings.place(self._name))

    @property
    def values(self) -> Tensor:
        return self._embeddings.sequence_values(self._name)

    def padded(self, length: int) -> Tensor:
        """Copies each value to its place, so that backward need not sum. Values beyond `length` share a spare row.
        Sequences that are all of this length are not copied."""
        values, num_samples = self.values, len(self.host_offsets) - 1
        if torch.equal(self.host_offsets, torch.arange(num_samples + 1) * length):
            return values.view(num_samples, length, values.shape[1])
        device = values.device
        numbers = torch.arange(num_samples, device=device)
        samples = torch.repeat_interleave(numbers, self.lengths, output_size=len(values))
        columns = torch.arange(len(values), device=device) - self.offsets.index_select(0, samples)
        targets = torch.where(columns < length, samples * length + columns, num_samples * length)
        padded = values.new_zeros(num_samples * length + 1, values.shape[1]).index_copy(0, targets, values)
        return padded[:-1].view(num_samples, length, values.shape[1])


class Embeddings(Mapping[str, "SequenceEmbedding | Tensor"]):
    """Embeddings by feature: a SequenceEmbedding, or a [num_samples, dim] tensor for a pooled feature."""

    def __init__(
        self,
        features: FeatureGroups,
        groups: Sequence[RequesterDedup],
        micro_batch: int,
        rows: Sequence[ModelRows],
        bags: Sequence[Bags] = (),
    ) -> None:
        """rows: the rows of the micro-batch by group, table after table; then the partial sums of bags."""
        self._features = features
        self._groups = groups
        self._micro_batch = micro_batch
        self._rows = rows
        self._bags = bags
        self._table_rows: dict[int, tuple[Tensor, ...]] = {}
        self._values: dict[str, SequenceEmbedding | Tensor] = {}
        self._gathered: dict[str, Tensor] = {}
        """Values of sequences on a device, by feature."""

    def __getitem__(self, name: str) -> "SequenceEmbedding | Tensor":
        if name not in self._values:
            self._make(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features.features)

    def __len__(self) -> int:
        return len(self._features.features)

    def side_by_side(self, names: Iterable[str] | None = None) -> Tensor:
        """Returns torch.cat of pooled features, all unless named: [num_samples, sum of dims]."""
        names = list(self if names is None else names)
        for name in names:
            if not isinstance(self._feature(name), Pooled):
                raise ValueError(f"feature {name!r} is a sequence: only pooled features stand side by side")
        if any(self._is_bags(name) for name in names):
            return torch.cat([self._tensor(name) for name in names], dim=1)
        if all(self._on_device(name) is None for name in names):
            occurrences = [self._host_occurrences(name) for name in names]
            if (groups := self._whole_groups(names)) is not None:
                return pool(
                    occurrences, [self._rows[g].tensor for g in groups], [self._rows_in(groups, n) for n in names]
                )
            return pool(occurrences, [self.table_rows(name) for name in names])
        joined = self._joined(names)
        return torch.cat([self._tensor(name) for name in names], dim=1) if joined is None else joined

    def table_rows(self, name: str) -> Tensor:
        """Returns the micro-batch's rows of the feature's table, [m, dim]."""
        self._feature(name)
        g, f = self._features.places[name]
        if g not in self._table_rows:
            sizes = self._groups[g].row_counts[self._micro_batch].tolist()
            rows = self._rows[g].tensor
            split: tuple[Tensor, ...] = rows.split(sizes)
            self._table_rows[g] = split if len(sizes) > 1 else (rows,)
        return self._table_rows[g][int(self._groups[g].group.feature_tables[f])]

    # ---- what TraceableEmbeddings needs to know ----

    def pooled_sets(self) -> list[list[str]]:
        """Returns the pooled features in lists, each of which `side_by_side` returns fastest."""
        sets: dict[object, list[str]] = {}
        for name, feature in self._features.features.items():
            if self._is_bags(name):
                b, _ = self._features.bag_places[name]
                sets.setdefault(("bags", b), []).append(name)
            elif isinstance(feature, Pooled):
                g, _ = self._features.places[name]
                is_on_device = self._on_device(name) is not None
                sets.setdefault(g if is_on_device else feature.table.dtype, []).append(name)
        return list(sets.values())

    def sequence(self, name: str) -> SequenceEmbedding:
        value = self[name]
        assert isinstance(value, SequenceEmbedding)
        return value

    def dim(self, name: str) -> int:
        return self._feature(name).table.dim

    def is_by_index(self, name: str) -> bool:
        feature = self._feature(name)
        return isinstance(feature, SequenceFeature) and feature.by_index

    # ---- rows in host memory ----

    def _host_part(self, name: str) -> FeaturePart:
        g, f = self._features.places[name]
        occurrences = self._groups[g].occurrences
        assert isinstance(occurrences, HostOccurrences)
        return occurrences.part(self._micro_batch, f)

    def _host_occurrences(self, name: str) -> Occurrences:
        feature, part = self._feature(name), self._host_part(name)
        assert isinstance(feature, Pooled)
        return Occurrences(part.index, part.offsets, pooling_weights(feature, part, self._num_rows(name)))

    def _whole_groups(self, names: list[str]) -> list[int] | None:
        """Returns the groups of the features if each table of these groups has exactly one of them; else None. Rows
        then need not be split by table, nor their gradients joined again, which copies them."""
        tables: dict[int, list[int]] = {}
        for name in names:
            g, f = self._features.places[name]
            tables.setdefault(g, []).append(int(self._groups[g].group.feature_tables[f]))
        is_whole = all(sorted(used) == list(range(len(self._groups[g].group.tables))) for g, used in tables.items())
        return list(tables) if is_whole else None

    def _rows_in(self, groups: list[int], name: str) -> RowsOf:
        """Returns the rows of a feature's table among those of the groups."""
        g, f = self._features.places[name]
        table, counts = int(self._groups[g].group.feature_tables[f]), self._groups[g].row_counts[self._micro_batch]
        return RowsOf(groups.index(g), int(counts[:table].sum()), int(counts[table]))

    def _num_rows(self, name: str) -> int:
        g, f = self._features.places[name]
        dedup = self._groups[g]
        return int(dedup.row_counts[self._micro_batch, dedup.group.feature_tables[f]])

    # ---- rows on a device: all features of a set are made together ----

    def device_occurrences(self, name: str) -> GroupOccurrences:
        """Returns the occurrences of a feature's group."""
        occurrences = self._on_device(name)
        assert occurrences is not None
        return occurrences

    def place(self, name: str) -> tuple[int, int]:
        """Returns the micro-batch, and the index of the feature in its group."""
        return self._micro_batch, self._features.places[name][1]

    def sequence_values(self, name: str) -> Tensor:
        """Returns the row of each key of a sequence, [n, dim]."""
        if name not in self._gathered:
            occurrences, s = self._set_of(name)
            feature_set = occurrences.group.feature_sets[s]
            sizes = occurrences.set_sizes(self._micro_batch, feature_set)
            rows = self._group_rows(name)
            values = on_device.gather(occurrences.sets[self._micro_batch][s], rows.variable, sizes, rows.stored)
            self._gathered.update(zip(self._names(occurrences, feature_set), values, strict=True))
        return self._gathered[name]

    def _on_device(self, name: str) -> GroupOccurrences | None:
        occurrences = self._groups[self._features.places[name][0]].occurrences
        return occurrences if isinstance(occurrences, GroupOccurrences) else None

    def _set_of(self, name: str) -> tuple[GroupOccurrences, int]:
        """Returns the occurrences of a feature's group, and the number of its set."""
        occurrences, (_, f) = self.device_occurrences(name), self._features.places[name]
        sets = occurrences.group.feature_sets
        return occurrences, next(s for s, feature_set in enumerate(sets) if f in feature_set.features)

    def _names(self, occurrences: GroupOccurrences, feature_set: FeatureSet) -> list[str]:
        return [occurrences.group.features[feature] for feature in feature_set.features]

    def _group_rows(self, name: str) -> ModelRows:
        return self._rows[self._features.places[name][0]]

    def _pool_set(self, name: str) -> None:
        """Pools all pooled features of a feature's group."""
        occurrences, s = self._set_of(name)
        names, rows = self._names(occurrences, occurrences.group.feature_sets[s]), self._group_rows(name)
        pooled = on_device.pool(occurrences.sets[self._micro_batch][s], rows.variable, len(names), rows.stored)
        self._values.update(zip(names, pooled, strict=True))

    def _joined(self, names: list[str]) -> Tensor | None:
        """Returns features side by side if they are a whole set, in its order; else None."""
        if not names or any(name in self._values for name in names):
            return None
        occurrences, s = self._set_of(names[0])
        if names != self._names(occurrences, occurrences.group.feature_sets[s]):
            return None
        rows = self._group_rows(names[0])
        return on_device.pool_joined(occurrences.sets[self._micro_batch][s], rows.variable, len(names), rows.stored)

    # ---- features that were pooled at the owner ----

    def _is_bags(self, name: str) -> bool:
        return name in self._features.bag_places

    def _pool_bags(self, name: str) -> None:
        """Adds the partial sums of all such features of a feature's group."""
        b, _ = self._features.bag_places[name]
        bags = self._bags[b]
        pooled = bags.parts[self._micro_batch].pool(self._rows[len(self._groups) + b].tensor)
        self._values.update(zip(bags.group.features, pooled, strict=True))

    def _make(self, name: str) -> None:
        """Makes the value of a feature, and of those that are made together with it."""
        feature = self._feature(name)
        if self._is_bags(name):
            self._pool_bags(name)
        elif self._on_device(name) is not None:
            if isinstance(feature, Pooled):
                self._pool_set(name)
            else:
                self._values[name] = DeviceSequence(feature.table, self, name)
        elif isinstance(feature, Pooled):
            self._values[name] = self.side_by_side([name])
        else:
            self._values[name] = HostSequence(feature.table, self.table_rows(name), self._host_part(name))

    def _tensor(self, name: str) -> Tensor:
        value = self[name]
        assert isinstance(value, Tensor)
        return value

    def _feature(self, name: str) -> Feature:
        features = self._features.features
        if name not in features:
            raise KeyError(f"there is no feature {name!r}; there are {sorted(features)}")
        return features[name]


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
