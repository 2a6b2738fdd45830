"""Groups, stores and owned keys for tests of resident rows."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nestpipe.embedding.group import TableGroup, group_features
from nestpipe.embedding.optim import RowOptimizer
from nestpipe.embedding.resident import ResidentRows
from nestpipe.embedding.route import OwnerDedup
from nestpipe.embedding.table import Pooled, Table
from nestpipe.store import HostStore, init

NUM_KEYS = 60
NAMES = ("item", "tag", "word")


def group_of(
    dim: int, optimizer: RowOptimizer, dtype: torch.dtype = torch.float32, names: Sequence[str] = NAMES, **more
) -> TableGroup:
    tables = [Table(name, dim, init=init.Normal(0.1), optimizer=optimizer, dtype=dtype, **more) for name in names]
    (group,) = group_features({table.name: Pooled(table) for table in tables}).groups
    return group


def store_of(group: TableGroup) -> HostStore:
    """Returns a store in which the even keys of each table have a record."""
    store = HostStore()
    for number, table in enumerate(group.tables):
        store.create_table(table.spec(seed=3))
        keys = torch.arange(0, NUM_KEYS, 2)
        records = torch.arange(len(keys) * group.num_columns, dtype=table.dtype).view(len(keys), -1) + 1000 * number
        store.scatter(table.name, keys, records, step=1)
    return store


def owned_keys(group: TableGroup, *keys: Sequence[int]) -> OwnerDedup:
    """Returns these keys of each table."""
    offsets = torch.tensor([0, *map(len, keys)]).cumsum(0)
    values = torch.tensor([key for table in keys for key in table], dtype=torch.int64)
    none = torch.empty(0, dtype=torch.int64)
    return OwnerDedup(group, values, offsets, none, torch.empty(0, 1, dtype=torch.uint8), np.zeros(1, dtype=np.int64))


def some_keys(group: TableGroup, sizes: Sequence[int]) -> OwnerDedup:
    """Returns sizes[t] keys of each table t."""
    return owned_keys(group, *(torch.randperm(NUM_KEYS)[:size].tolist() for size in sizes))


def by_table(keys: OwnerDedup | ResidentRows) -> Iterator[tuple[str, Tensor, slice]]:
    """Yields the name and keys of each table, and where they are."""
    for number, name in enumerate(keys.group.names):
        places = slice(*keys.table_offsets[number : number + 2].tolist())
        yield name, keys.keys[places], places
