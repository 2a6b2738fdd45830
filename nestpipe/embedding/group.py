"""Table groups: tables that every call handles together.

A group is all tables of the same dim, dtype, frozen flag and placement whose row optimizers are equal. Its tables stand
in order of their names. Within a group the rows of all tables lie in one array, so that one native call, or one kernel,
serves all of them.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.optim import RowOptimizer, group_key
from nestpipe.embedding.table import Feature, Pooled, Table, tables_of
from nestpipe.store.interface import MOST_ROWS
from nestpipe.store.native.plan_ops import table_salts


@dataclass(frozen=True)
class FeatureSet:
    """Features of a group that a device handles in one launch."""

    features: tuple[int, ...]
    """Indices in the group; pooled features in the order in which the user gave them, sequences in order of table."""
    is_pooled: bool


@dataclass(frozen=True)
class TableGroup:
    """Tables of one group, in order of their names, and the features that use them."""

    tables: tuple[Table, ...]
    features: tuple[str, ...]
    """Names of the features that use these tables, in order of table."""
    feature_tables: NDArray[np.int64]
    """[features] index of each feature's table in the group."""
    feature_keys: NDArray[np.int64]
    """[features, 6] argument of the native dedup, without addresses and numbers of keys."""
    salts: Tensor
    """[tables] salt of each table's key hashes, from its name."""
    feature_sets: tuple[FeatureSet, ...]
    """All features, each in one set."""
    is_replicated: bool = False
    """True if every rank has all rows."""
    has_by_index: bool = False
    """True if the model reads all rows of a micro-batch, and the row of each key, of some feature."""
    bags: "TableGroup | None" = None
    """The same tables with the features that are pooled at the owners of their keys; None if there are none."""

    @property
    def dim(self) -> int:
        return self.tables[0].dim

    @property
    def dtype(self) -> torch.dtype:
        return self.tables[0].dtype

    @property
    def frozen(self) -> bool:
        return self.tables[0].frozen

    @property
    def optimizer(self) -> RowOptimizer:
        return self.tables[0].optimizer

    @cached_property
    def allows_late_gradients(self) -> bool:
        """Returns whether some rows of a batch may be updated during the next one."""
        return not self.frozen and not self.is_replicated and self.optimizer.updates_in_parts

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(table.name for table in self.tables)

    @cached_property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    @cached_property
    def num_columns(self) -> int:
        """Returns the columns of a record: row and row state."""
        return self.tables[0].spec(seed=0).num_columns

    @cached_property
    def record_bytes(self) -> int:
        return self.num_columns * self.dtype.itemsize

    @cached_property
    def most_rows(self) -> NDArray[np.int64]:
        """Returns the most rows that each table may have on one rank, [tables]."""
        return np.array([table.max_rows or MOST_ROWS for table in self.tables], dtype=np.int64)


@dataclass(frozen=True)
class FeatureGroups:
    """The features of a model, and the groups of their tables."""

    features: Mapping[str, Feature]
    groups: tuple[TableGroup, ...]
    table_order: NDArray[np.int64]
    """[tables] indices of all tables, counted group after group, in order of the tables' names."""
    places: Mapping[str, tuple[int, int]]
    """Group of each feature whose rows travel, and its index in the group."""
    bag_groups: tuple[int, ...]
    """Groups with features that are pooled at the owner."""
    bag_places: Mapping[str, tuple[int, int]]
    """For each feature that is pooled at the owner: the number of its group in bag_groups, and its own number among the
    features of that group's `TableGroup.bags`."""

    @property
    def num_tables(self) -> int:
        return len(self.table_order)


def group_features(
    features: Mapping[str, Feature], has_replicas: bool = True, pools_at_owner: bool = False
) -> FeatureGroups:
    """Groups the tables of these features. Groups are ordered by the names of their first tables.

    has_replicas: False to read rows from their owners, whatever the placement of their tables. pools_at_owner: False to
    pool all features at the requester, wherever they say."""
    by_key: dict[tuple[Hashable, ...], list[Table]] = {}
    for table in tables_of(features):
        optimizer = None if table.frozen else group_key(table.optimizer)
        placement = table.placement if has_replicas else None
        by_key.setdefault((table.dim, table.dtype, table.frozen, optimizer, placement), []).append(table)
    at_owner = {name for name, f in features.items() if pools_at_owner and isinstance(f, Pooled) and f.where == "owner"}
    groups = tuple(_group(tables, features, at_owner, key[-1] == "replicated") for key, tables in by_key.items())
    names = [table.name for group in groups for table in group.tables]
    order = np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
    bags = {g: group.bags for g, group in enumerate(groups) if group.bags is not None}
    places = _places(groups), tuple(bags), _places(bags.values())
    return FeatureGroups(dict(features), groups, order, *places)


def _places(groups: Iterable[TableGroup]) -> dict[str, tuple[int, int]]:
    return {name: (g, f) for g, group in enumerate(groups) for f, name in enumerate(group.features)}


def _group(
    tables: list[Table], features: Mapping[str, Feature], at_owner: Collection[str], is_replicated: bool
) -> TableGroup:
    """at_owner: the features that are pooled at the owner."""
    rows = {name: feature for name, feature in features.items() if name not in at_owner}
    group = _with_features(tables, rows, is_replicated)
    bags = _with_features(tables, {name: features[name] for name in features if name in at_owner}, is_replicated)
    return replace(group, bags=bags) if bags.features else group


def _with_features(tables: list[Table], features: Mapping[str, Feature], is_replicated: bool) -> TableGroup:
    numbers = {table.name: number for number, table in enumerate(tables)}
    entries = [(numbers[f.table.name], name, f) for name, f in features.items() if f.table.name in numbers]
    entries.sort(key=lambda item: item[0])  # stable: features of one table keep their order
    keys = [
        (0, 0, number, feature.padding_key is not None, feature.padding_key or 0, feature.table.num_keys or 0)
        for number, _, feature in entries
    ]
    return TableGroup(
        tables=tuple(tables),
        features=tuple(name for _, name, _ in entries),
        feature_tables=np.array([number for number, _, _ in entries], dtype=np.int64),
        feature_keys=np.array(keys, dtype=np.int64).reshape(len(entries), 6),
        salts=table_salts([table.name for table in tables]),
        feature_sets=_feature_sets([name for _, name, _ in entries], features),
        is_replicated=is_replicated,
        has_by_index=any(getattr(feature, "by_index", False) for _, _, feature in entries),
    )


def _feature_sets(names: list[str], features: Mapping[str, Feature]) -> tuple[FeatureSet, ...]:
    """names: the features of a group, in its order."""
    numbers = {name: number for number, name in enumerate(names)}
    pooled = [numbers[name] for name, feature in features.items() if isinstance(feature, Pooled) and name in numbers]
    sequences = [number for number in range(len(names)) if number not in pooled]
    by_index = [number for number in sequences if getattr(features[names[number]], "by_index", False)]
    gathered = [number for number in sequences if number not in by_index]
    sets = [FeatureSet(tuple(pooled), is_pooled=True), FeatureSet(tuple(gathered), is_pooled=False)]
    sets += [FeatureSet((number,), is_pooled=False) for number in by_index]
    return tuple(feature_set for feature_set in sets if feature_set.features)
