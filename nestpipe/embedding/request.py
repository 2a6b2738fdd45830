"""The requester's side of a batch, before anything is sent: which rows it needs, and where they go.

For each table: the distinct keys of the batch, those of owner 0 first, each owner's in order of first use. The place of
a key in this list is its position; all that follows speaks of positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged, split
from nestpipe.embedding.table import Feature, Table, tables_of
from nestpipe.store import group_by_owner, unique

MOST_LOSSES = 8


@dataclass(frozen=True)
class Placed:
    """The occurrences of a feature's keys in one micro-batch."""

    index: Tensor
    """[n] row of the micro-batch's leaf for each key; one beyond the last row where the key is padding."""
    offsets: Tensor
    weights: Tensor | None

    def to(self, device: torch.device) -> "Placed":
        weights = None if self.weights is None else self.weights.to(device)
        return Placed(self.index.to(device), self.offsets.to(device), weights)


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

    def to(self, device: torch.device) -> "Request":
        """What the model is given, on the device."""
        placed = [{name: p.to(device) for name, p in of_features.items()} for of_features in self.placed]
        inputs: list[Mapping[str, Tensor]] = [{n: value.to(device) for n, value in of.items()} for of in self.inputs]
        return replace(self, placed=placed, inputs=inputs)


def make_request(
    features: Mapping[str, Feature],
    batch: Batch | None,
    num_micro_batches: int,
    world_size: int,
    num_threads: int = 1,
) -> Request:
    """Splits a batch into micro-batches and dedups their keys. None: this rank has no batch, others may."""
    has_batch = batch is not None
    if batch is None:
        batch = Batch({name: Jagged.from_lists([]) for name in features}, weight={})
    check_keys(features, batch)
    check_weights(batch)
    parts = split(batch, num_micro_batches)
    placed: list[dict[str, Placed]] = [{} for _ in parts]
    tables = [
        _request_of_table(table, features, parts, placed, world_size, num_threads) for table in tables_of(features)
    ]
    inputs, num_samples = [part.inputs for part in parts], [len(part) for part in parts]
    return Request(tables, placed, inputs, num_samples, batch.weights, has_batch)


def check_weights(batch: Batch) -> None:
    """Refuses weights that no sum of losses can be divided by, or that do not fit the route's header."""
    if len(batch.weights) > MOST_LOSSES:
        raise ValueError(f"the batch has {len(batch.weights)} weights; at most {MOST_LOSSES} losses are supported")
    for name, weight in batch.weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the weight{f' of loss {name!r}' if name else ''} of a batch is {weight}, must be >= 0")


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


def _request_of_table(
    table: Table,
    features: Mapping[str, Feature],
    parts: list[Batch],
    placed: list[dict[str, Placed]],
    world_size: int,
    num_threads: int,
) -> TableRequest:
    names = [name for name, feature in features.items() if feature.table is table]
    values = [part.keys[name].values for part in parts for name in names]
    present = [_present(features[name], part.keys[name].values) for part in parts for name in names]
    occurrences = [v if p is None else v[p] for v, p in zip(values, present, strict=True)]
    together = torch.cat(occurrences) if len(occurrences) > 1 else occurrences[0].contiguous()
    distinct, inverse = unique(together, num_threads)
    keys, counts, positions = _by_owner(table, distinct, inverse, world_size)
    of_occurrences = positions.split([len(values) for values in occurrences])
    of_parts = [of_occurrences[i * len(names) : (i + 1) * len(names)] for i in range(len(parts))]

    uses = _uses(of_parts, len(keys))
    leaves = []
    for i, part in enumerate(parts):
        leaf, row_of = _leaf(uses[:, i])
        leaves.append(leaf)
        for j, name in enumerate(names):
            rows = of_parts[i][j] if row_of is None else row_of[of_parts[i][j]]
            placed[i][name] = _placed(part.keys[name], rows, present[i * len(names) + j], len(leaf))
    return TableRequest(table, keys, counts, uses, leaves)


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


def _uses(of_parts: list[tuple[Tensor, ...]], num_keys: int) -> Tensor:
    if len(of_parts) == 1:
        return torch.ones(num_keys, 1, dtype=torch.bool)
    uses = torch.zeros(num_keys, len(of_parts), dtype=torch.bool)
    for i, of_features in enumerate(of_parts):
        for positions in of_features:
            uses[positions, i] = True
    return uses


def _leaf(used: Tensor) -> tuple[Tensor, Tensor | None]:
    """The positions a micro-batch uses, and the row of each position in its leaf; None: positions are rows."""
    leaf = used.nonzero().flatten()
    return leaf, None if len(leaf) == len(used) else used.cumsum(0) - 1


def _placed(jagged: Jagged, rows: Tensor, present: Tensor | None, padding: int) -> Placed:
    index = rows
    if present is not None:
        index = torch.full_like(jagged.values, padding)
        index[present] = rows
    weights = None if jagged.weights is None else jagged.weights.contiguous()
    return Placed(index, jagged.offsets.contiguous(), weights)
