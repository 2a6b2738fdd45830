"""The requester's side of a batch, before anything is sent: which rows it needs, and where they go.

For each table: the distinct keys of the batch, those of owner 0 first, each owner's in order of first use. The place of
a key in this list is its position; all that follows speaks of positions.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.cluster import GIVEN_ORDER, Clustering, in_order
from nestpipe.embedding.table import Feature, Table, tables_of
from nestpipe.kernels.pooling import DeviceOccurrences
from nestpipe.store import group_by_owner, unique

MOST_LOSSES = 8


@dataclass(frozen=True)
class Placed:
    """The occurrences of a feature's keys in one micro-batch."""

    index: Tensor
    """[n] row of the micro-batch's leaf for each key; one beyond the last row where the key is padding."""
    offsets: Tensor
    weights: Tensor | None
    host_offsets: Tensor
    """the same offsets, in host memory"""
    occurrences: DeviceOccurrences | None = None
    """the same once more, as kernels of a device need it"""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Placed":
        """All that goes to the device."""
        weights = None if self.weights is None else function(self.weights)
        occurrences = None if self.occurrences is None else self.occurrences.map(function)
        return Placed(function(self.index), function(self.offsets), weights, self.host_offsets, occurrences)


@dataclass(frozen=True)
class TableRequest:
    table: Table
    keys: Tensor
    """[n] by position"""
    counts: list[int]
    """keys of each owner"""
    uses: Tensor
    """[n, num_micro_batches] bool: whether a micro-batch uses the key"""
    leaves: list[Tensor]
    """for each micro-batch the positions of its distinct keys, ascending: the rows of its leaf"""
    first_uses: list[Tensor] = field(default_factory=list)
    """for each micro-batch: which of these keys no micro-batch before it has; on a device, in a world of one"""

    def map(self, function: Callable[[Tensor], Tensor]) -> "TableRequest":
        """All that goes to the device."""
        leaves, first_uses = ([function(array) for array in of] for of in (self.leaves, self.first_uses))
        return replace(self, leaves=leaves, first_uses=first_uses)

    def with_first_uses(self) -> "TableRequest":
        is_new, first_uses = torch.ones(len(self.keys), dtype=torch.bool), []
        for leaf in self.leaves:
            first_uses.append(is_new[leaf])
            is_new[leaf] = False
        return replace(self, first_uses=first_uses)

    def of_owner(self, owner: int) -> tuple[Tensor, Tensor]:
        """One owner's keys and their uses."""
        first = sum(self.counts[:owner])
        part = slice(first, first + self.counts[owner])
        return self.keys[part], self.uses[part]


@dataclass(frozen=True)
class Request:
    """A batch, ready to be routed."""

    tables: list[TableRequest]
    placed: list[dict[str, Placed]]
    """for each micro-batch, by feature"""
    inputs: list[Mapping[str, Tensor]]
    """for each micro-batch"""
    num_samples: list[int]
    """for each micro-batch"""
    weights: dict[str, float]
    has_batch: bool
    """False: this rank is out of data, and takes part with nothing"""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Request":
        """All that goes to the device."""
        return replace(
            self,
            tables=[table.map(function) for table in self.tables],
            placed=[{name: placed.map(function) for name, placed in of.items()} for of in self.placed],
            inputs=[{name: function(value) for name, value in of.items()} for of in self.inputs],
        )


def make_request(
    features: Mapping[str, Feature],
    batch: Batch | None,
    num_micro_batches: int,
    world_size: int,
    num_threads: int = 1,
    clustering: Clustering = GIVEN_ORDER,
) -> Request:
    """Dedups the keys of a batch and splits it into micro-batches. None: this rank has no batch, others may."""
    has_batch = batch is not None
    if batch is None:
        batch = Batch({name: Jagged.from_lists([]) for name in features}, weight={})
    check_keys(features, batch)
    check_weights(batch)
    check_inputs(batch)
    tables = [_distinct(table, features, batch, world_size, num_threads) for table in tables_of(features)]
    parts = _parts(tables, batch, num_micro_batches, clustering)
    splits = [_Split(table, parts) for table in tables]
    return Request(
        [split.request() for split in splits],
        [_together(split.placed(i) for split in splits) for i in range(len(parts))],
        _inputs(batch, parts),
        [len(part) for part in parts],
        batch.weights,
        has_batch,
    )


def check_weights(batch: Batch) -> None:
    """Refuses weights that no sum of losses can be divided by, or that do not fit the route's header."""
    if len(batch.weights) > MOST_LOSSES:
        raise ValueError(f"the batch has {len(batch.weights)} weights; at most {MOST_LOSSES} losses are supported")
    for name, weight in batch.weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the weight{f' of loss {name!r}' if name else ''} of a batch is {weight}, must be >= 0")


def check_inputs(batch: Batch) -> None:
    """Refuses what cannot be cut into micro-batches, and cannot go to a device."""
    for name, value in batch.inputs.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"input {name!r} of a batch must be a torch.Tensor, got {type(value).__name__}")


def check_keys(features: Mapping[str, Feature], batch: Batch) -> None:
    """Refuses a batch that does not have the features' keys, or has keys outside a table's range."""
    if features.keys() != batch.keys.keys():
        missing, unknown = sorted(features.keys() - batch.keys.keys()), sorted(batch.keys.keys() - features.keys())
        raise ValueError(f"the batch's features do not match: missing {missing}, unknown {unknown}")
    for name, feature in features.items():
        num_keys, jagged = feature.table.num_keys, batch.keys[name]
        if num_keys is None:
            continue
        outside = (jagged.values < 0) | (jagged.values >= num_keys)
        if feature.padding_key is not None:
            outside &= jagged.values != feature.padding_key
        if bool(outside.any()):
            where = int(outside.nonzero()[0])
            sample = int(torch.searchsorted(jagged.offsets, where, right=True)) - 1
            raise ValueError(
                f"feature {name!r}, sample {sample}: key {int(jagged.values[where])} is outside "
                f"0 .. {num_keys - 1}, the keys of table {feature.table.name!r} (num_keys = {num_keys})"
            )


@dataclass(frozen=True)
class _Distinct:
    """The distinct keys of one table in a batch."""

    table: Table
    keys: Tensor
    counts: list[int]
    features: dict[str, Jagged]
    """the position of each key, -1 for padding"""


def _distinct(
    table: Table, features: Mapping[str, Feature], batch: Batch, world_size: int, num_threads: int
) -> _Distinct:
    jagged = {name: batch.keys[name] for name, feature in features.items() if feature.table is table}
    present = [_present(features[name], of.values) for name, of in jagged.items()]
    occurrences = [of.values if p is None else of.values[p] for of, p in zip(jagged.values(), present, strict=True)]
    together = torch.cat(occurrences) if len(occurrences) > 1 else occurrences[0].contiguous()
    keys, counts, positions = _by_owner(table, *unique(together, num_threads), world_size)
    placed = {}
    for (name, of), p, found in zip(
        jagged.items(), present, positions.split([len(values) for values in occurrences]), strict=True
    ):
        if p is not None:
            found = torch.full_like(of.values, -1).masked_scatter_(p, found)
        placed[name] = Jagged(found, of.offsets.contiguous(), of.weights)
    return _Distinct(table, keys, counts, placed)


def _present(feature: Feature, values: Tensor) -> Tensor | None:
    """Which keys are not padding; None: all."""
    return None if feature.padding_key is None else values != feature.padding_key


def _by_owner(table: Table, distinct: Tensor, inverse: Tensor, world_size: int) -> tuple[Tensor, list[int], Tensor]:
    """Keys by position, how many each owner has, and the position of each occurrence."""
    if world_size == 1:
        return distinct, [len(distinct)], inverse
    order, counts = group_by_owner(table.name, distinct, world_size)
    position_of = torch.empty_like(order)
    position_of[order] = torch.arange(len(order))
    return distinct[order], counts.tolist(), position_of[inverse]


def _parts(tables: list[_Distinct], batch: Batch, num_parts: int, clustering: Clustering) -> list[Tensor]:
    """The samples of each micro-batch."""
    if clustering.keeps_order(num_parts):
        return in_order(len(batch), num_parts)
    numbered, num_distinct = [], 0
    for table in tables:
        for of in table.features.values():
            numbers = torch.where(of.values < 0, -1, of.values + num_distinct) if num_distinct > 0 else of.values
            numbered.append(Jagged(numbers, of.offsets))
        num_distinct += len(table.keys)
    return clustering.parts(numbered, num_distinct, num_parts)


class _Split:
    """One table's part of a batch that is split into micro-batches."""

    def __init__(self, distinct: _Distinct, parts: list[Tensor]) -> None:
        self._distinct = distinct
        self._features = {name: _split(of, parts) for name, of in distinct.features.items()}
        self._uses = self._used_by(len(parts))
        self._leaves = [used.nonzero().flatten() for used in self._uses.unbind(1)]

    def request(self) -> TableRequest:
        return TableRequest(self._distinct.table, self._distinct.keys, self._distinct.counts, self._uses, self._leaves)

    def placed(self, part: int) -> dict[str, Placed]:
        """By feature: the rows of a micro-batch's leaf at its occurrences of keys."""
        num_rows = len(self._leaves[part])
        row_of = None
        if num_rows < len(self._uses):
            row_of = torch.full((len(self._uses) + 1,), num_rows)  # the last, which -1 finds, is for padding
            row_of[self._leaves[part]] = torch.arange(num_rows)
        placed = {}
        for name, of_parts in self._features.items():
            of = of_parts[part]
            index = row_of[of.values] if row_of is not None else torch.where(of.values < 0, num_rows, of.values)
            weights = None if of.weights is None else of.weights.contiguous()
            placed[name] = Placed(index, of.offsets, weights, of.offsets)
        return placed

    def _used_by(self, num_parts: int) -> Tensor:
        if num_parts == 1:
            return torch.ones(len(self._distinct.keys), 1, dtype=torch.bool)
        uses = torch.zeros(len(self._distinct.keys) + 1, num_parts, dtype=torch.bool)
        for of_parts in self._features.values():
            for i, of in enumerate(of_parts):
                uses[of.values, i] = True
        return uses[:-1]


def _together(of_tables: Iterable[dict[str, Placed]]) -> dict[str, Placed]:
    return {name: placed for of_table in of_tables for name, placed in of_table.items()}


def _split(of: Jagged, parts: list[Tensor]) -> list[Jagged]:
    return [of] if len(parts) == 1 else of.take(torch.cat(parts)).split([len(part) for part in parts])


def _inputs(batch: Batch, parts: list[Tensor]) -> list[Mapping[str, Tensor]]:
    if len(parts) == 1:
        return [batch.inputs]
    samples, sizes = torch.cat(parts), [len(part) for part in parts]
    inputs = {name: value[samples].split(sizes) for name, value in batch.inputs.items()}
    return [{name: values[i] for name, values in inputs.items()} for i in range(len(parts))]
