"""The requester's side of a batch, before anything is sent: which rows it needs, and where they go.

For each table: the distinct keys of the batch, those of owner 0 first, each owner's in order of first use. The place of
a key in this list is its position; all that follows speaks of positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
    """for each micro-batch the positions of its distinct keys: the rows of its leaf"""


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
    present = [{name: _present(features[name], part.keys[name].values) for name in names} for part in parts]
    occurrences = [part.keys[name].values[present[i][name]] for i, part in enumerate(parts) for name in names]
    distinct, inverse = unique(torch.cat(occurrences), num_threads)
    order, counts = group_by_owner(table.name, distinct, world_size)
    position_of = torch.empty_like(order)
    position_of[order] = torch.arange(len(order))
    positions = iter(position_of[inverse].split([len(values) for values in occurrences]))

    uses = torch.zeros(len(distinct), len(parts), dtype=torch.bool)
    leaves = []
    for i, part in enumerate(parts):
        of_features = [next(positions) for _ in names]
        leaf, index = unique(torch.cat(of_features), num_threads)
        leaves.append(leaf)
        uses[leaf, i] = True
        indices = index.split([len(values) for values in of_features])
        for name, feature_index in zip(names, indices, strict=True):
            jagged = part.keys[name]
            full = torch.full_like(jagged.values, len(leaf))
            full[present[i][name]] = feature_index
            placed[i][name] = Placed(full, jagged.offsets, jagged.weights)
    return TableRequest(table, distinct[order], counts.tolist(), uses, leaves)


def _present(feature: Feature, values: Tensor) -> Tensor:
    """Which keys are not padding."""
    if feature.padding_key is None:
        return torch.ones_like(values, dtype=torch.bool)
    return values != feature.padding_key
