"""Places that are "auto": chosen from the first batch, once, by the bytes that would travel between ranks.

A pooled feature is pooled at the owner if that takes fewer bytes. A table is replicated if it is small, and if the
ranks use so many of the same keys that this takes hardly more bytes: its rows are then there before the model runs.
Every rank adds up the counts of all, so that all choose alike. A world of one has nothing to choose.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeGuard

import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import BatchSource
from nestpipe.distributed import World
from nestpipe.embedding.bags import split_bags
from nestpipe.embedding.group import TableGroup, group_features
from nestpipe.embedding.key_lists import SampleOrder
from nestpipe.embedding.replica import KEY_BYTES
from nestpipe.embedding.table import AUTO, Feature, Pooled, Table, tables_of
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.store import group_by_owner

MOST_REPLICATED_BYTES = 2**24
"""Rows and row state of a table that "auto" may replicate."""
MOST_GROWTH = 1.1
"""Bytes of a replicated table, relative to those of a sharded one, up to which "auto" replicates it."""
NUMBER_BYTES = 4

Places = dict[str, dict[str, str]]
"""Choices: under "placement" by table, under "where" by feature."""


def has_auto(features: Mapping[str, Feature]) -> bool:
    """Returns whether some place has to be chosen."""
    return any(_is_auto(feature) or feature.table.placement == AUTO for feature in features.values())


def _is_auto(feature: Feature) -> TypeGuard[Pooled]:
    return isinstance(feature, Pooled) and feature.where == AUTO


def _first_batch(source: BatchSource) -> Batch | None:
    """Returns the first batch of a source, which keeps it; None if it has none, or if reading it fails. The error is
    raised when the pipeline reads the batch, so that all ranks learn of it."""
    pulled: list[Batch | Exception] = []
    try:
        pulled += islice(source, 1)
    except Exception as error:
        pulled.append(error)
    source.give_back(pulled)
    batch = pulled[0] if pulled else None
    return batch if isinstance(batch, Batch) else None


def with_places(features: Mapping[str, Feature], places: Places) -> dict[str, Feature]:
    """Returns the features with chosen places instead of "auto"."""
    placements, wheres = places.get("placement", {}), places.get("where", {})
    tables = {table.name: table for table in tables_of(features)}
    for name, placement in placements.items():
        if name in tables and tables[name].placement == AUTO:
            tables[name] = replace(tables[name], placement=placement)
    made: dict[str, Feature] = {}
    for name, feature in features.items():
        made[name] = replace(feature, table=tables[feature.table.name])
        if _is_auto(feature) and name in wheres:
            table = tables[feature.table.name]
            where = "requester" if table.placement == "replicated" else wheres[name]  # as chosen by an earlier run
            made[name] = replace(feature, table=table, where=where)
    return made


def choose_places(
    features: Mapping[str, Feature], source: BatchSource, world: World, options: PipelineOptions
) -> Places:
    """Chooses what is "auto", and prints it. All ranks call it."""
    with world.watch.doing("the choice of places"):
        batch = _first_batch(source)
        tables = _choose_tables(features, batch, world, options)
        settled = with_places(features, {"placement": {name: choice.place for name, choice in tables.items()}})
        wheres = _choose_pooling(settled, batch, world, options)
    if world.rank == 0:
        for name, choice in tables.items():
            print(f'nestpipe: placement = "auto": table {name} is {choice.text}', flush=True)
        for name, choice in wheres.items():
            print(f'nestpipe: where = "auto": feature {name} is pooled at the {choice.text}', flush=True)
    return {
        "placement": {name: choice.place for name, choice in tables.items()},
        "where": {name: choice.place for name, choice in wheres.items()},
    }


@dataclass(frozen=True)
class _Choice:
    place: str
    why: str

    @property
    def text(self) -> str:
        return f"{self.place}: {self.why}"


def _compared(place: str, num_bytes: int, other_bytes: int) -> _Choice:
    return _Choice(place, f"{num_bytes:,} bytes between ranks in the first batch, not {other_bytes:,}")


@dataclass(frozen=True)
class _RowBytes:
    """Bytes of one key that travels as a row: the key itself, its row, its gradient."""

    key: int
    row: int
    gradient: int

    @staticmethod
    def of(group: TableGroup, options: PipelineOptions) -> "_RowBytes":
        codecs, mask = options.codecs, (options.num_micro_batches + 7) // 8
        gradient = 0 if group.frozen else codecs.gradients.row_bytes(group)
        return _RowBytes(KEY_BYTES + mask, codecs.rows.row_bytes(group), gradient)

    @property
    def total(self) -> int:
        return self.key + self.row + self.gradient


# ---- features ----


def _choose_pooling(
    features: Mapping[str, Feature], batch: Batch | None, world: World, options: PipelineOptions
) -> dict[str, _Choice]:
    auto = {name: feature for name, feature in features.items() if _is_auto(feature)}
    objection = _objection_to_owners(world, options)
    numbers = torch.zeros(len(auto), 2, dtype=torch.int64)
    for i, (name, feature) in enumerate(auto.items()):
        if not objection and feature.table.placement != "replicated":
            numbers[i] = _pooling_bytes(name, feature, batch, world, options)
    world.control.all_reduce_sum(numbers)
    choices = {}
    for (name, feature), (rows, sums) in zip(auto.items(), numbers.tolist(), strict=True):
        if feature.table.placement == "replicated":
            choices[name] = _Choice("requester", "its table is replicated")
        elif objection:
            choices[name] = _Choice("requester", objection)
        else:
            choices[name] = _compared("owner", sums, rows) if sums < rows else _compared("requester", rows, sums)
    return choices


def _objection_to_owners(world: World, options: PipelineOptions) -> str:
    """Returns why no feature can be pooled at the owner; "" if features can."""
    if options.device_budget_bytes is not None or options.stale:
        return "memory.device_budget_bytes and pipeline.stale do not combine with pooling at the owner"
    if world.hosts is not None or world.mesh.num_replicas > 1:
        return "exchange.hosts and exchange.replicas do not combine with pooling at the owner"
    return ""


def _pooling_bytes(name: str, feature: Pooled, batch: Batch | None, world: World, options: PipelineOptions) -> Tensor:
    """Returns the bytes of this rank's part of the batch with pooling at the requester and at the owner. Zeros if it
    has none, or if its keys are wrong, which the pipeline finds out."""
    if batch is None or name not in batch.keys:
        return torch.zeros(2, dtype=torch.int64)
    alone = group_features({name: replace(feature, where="owner")}, pools_at_owner=True)
    order = SampleOrder.in_order(len(batch.keys[name]), 1)
    try:
        (bags,) = split_bags(alone, Batch({name: batch.keys[name]}), order, world.size, options.num_threads)
    except ValueError:
        return torch.zeros(2, dtype=torch.int64)
    is_other = torch.arange(world.size) != world.rank
    keys, sums, occurrences = (
        int(counts[is_other].sum())
        for counts in (bags.counts, torch.from_numpy(bags.sum_counts), torch.from_numpy(bags.occurrence_counts))
    )
    one = _RowBytes.of(bags.group, options)
    weight = 0 if bags.weights is None else bags.weights.itemsize
    at_owner = keys * KEY_BYTES + sums * (NUMBER_BYTES + one.row + one.gradient) + occurrences * (NUMBER_BYTES + weight)
    return torch.tensor([keys * one.total, at_owner])


# ---- tables ----


def _choose_tables(
    features: Mapping[str, Feature], batch: Batch | None, world: World, options: PipelineOptions
) -> dict[str, _Choice]:
    choices = {}
    for table in tables_of(features):
        if table.placement == AUTO:
            objection = _objection(table, features, world, options)
            if objection:
                choices[table.name] = _Choice("sharded", objection)
            else:
                choices[table.name] = _choose_table(table, features, batch, world, options)
    return choices


def _objection(table: Table, features: Mapping[str, Feature], world: World, options: PipelineOptions) -> str:
    """Returns why a table cannot be replicated; "" if it can be."""
    if world.hosts is not None:
        return "exchange.hosts does not combine with replicated tables"
    if options.device_budget_bytes is not None or options.stale:
        return "memory.device_budget_bytes and pipeline.stale do not combine with replicated tables"
    if any(isinstance(f, Pooled) and f.where == "owner" and f.table is table for f in features.values()):
        return "a feature of it is pooled at the owner"
    if not table.frozen and not table.optimizer.updates_in_parts:
        return "its row optimizer has not set can_update_in_parts"
    if table.num_keys is None:
        return "its size is unknown, for num_keys is not set"
    if table.num_keys * _group_of(table).record_bytes > MOST_REPLICATED_BYTES:
        return f"its rows and row state may take more than {MOST_REPLICATED_BYTES // 2**20} MiB"
    return ""


def _group_of(table: Table) -> TableGroup:
    (group,) = group_features({table.name: Pooled(table)}).groups
    return group


def _choose_table(
    table: Table, features: Mapping[str, Feature], batch: Batch | None, world: World, options: PipelineOptions
) -> _Choice:
    assert table.num_keys is not None
    keys = _keys_of(table, features, batch)
    num_shards = world.mesh.num_shards
    _, owned = group_by_owner(table.name, keys, num_shards)
    numbers = torch.zeros(table.num_keys + 1, dtype=torch.int64)
    numbers[0] = len(keys) - owned[world.mesh.shard]
    numbers[1 + keys] = 1
    world.control.all_reduce_sum(numbers)
    num_asked, num_used = int(numbers[0]), int((numbers[1:] > 0).sum())
    group = _group_of(table)
    one, sum_bytes = _RowBytes.of(group, options), 0 if table.frozen else group.row_bytes
    sharded = num_asked * one.total
    replicated = num_asked * (one.key + one.gradient) + num_used * (num_shards - 1) * (KEY_BYTES + sum_bytes)
    if num_asked > 0 and replicated <= MOST_GROWTH * sharded:
        return _compared("replicated", replicated, sharded)
    return _compared("sharded", sharded, replicated)


def _keys_of(table: Table, features: Mapping[str, Feature], batch: Batch | None) -> Tensor:
    """Returns the distinct keys of a table in a batch, without those that it does not have."""
    assert table.num_keys is not None
    parts = [torch.empty(0, dtype=torch.int64)]
    for name, feature in features.items():
        if feature.table is table and batch is not None and name in batch.keys:
            values = batch.keys[name].values
            parts.append(values if feature.padding_key is None else values[values != feature.padding_key])
    keys: Tensor = torch.cat(parts).unique()
    return keys[(keys >= 0) & (keys < table.num_keys)]
