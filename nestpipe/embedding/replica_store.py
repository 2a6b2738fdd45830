"""The store of replicated tables: each rank has the rows that it owns in the store of the run, and all rows in copies.

Training reads the copies, and writes both. So everything else, such as digests, checkpoints and evaluation, sees each
row once, on its owner, as if the table had no replicas.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nestpipe.distributed import World
from nestpipe.embedding.group import FeatureGroups
from nestpipe.store import NUM_BUCKETS, HostStore, Piece, Store, TableSpec, Writer, group_by_owner
from nestpipe.store.interface import RowStore

STEP_BYTES = KEY_BYTES = 8


class ReplicaStore:
    """A RowStore. Tables that are not replicated pass through."""

    def __init__(self, store: Store, tables: Sequence[str], world: World) -> None:
        self.store = store
        """The store of the run, which has the rows of keys that this rank owns."""
        self.tables = frozenset(tables)
        """Replicated tables."""
        self._world = world
        self.copies = self._empty()
        """All rows of the replicated tables, as of the last write."""

    @property
    def num_threads(self) -> int:
        return self.store.num_threads

    @property
    def num_writes(self) -> int:
        return self.store.num_writes

    def refresh(self) -> None:
        """Makes the copies anew, from the rows of all owners. All ranks call it, with no rows in training."""
        self.copies = self._empty()
        for name in sorted(self.tables):
            spec, own = self.copies.spec(name), self.store.export_piece(name, 0, NUM_BUCKETS)
            content = torch.cat([array.reshape(-1).view(torch.uint8) for array in own])
            is_needed = self._world.mesh.replica == 0  # the other sharding groups have the same rows
            for part in self._world.control.all_gather_bytes(content if is_needed else content[:0]):
                self.copies.import_piece(name, 0, NUM_BUCKETS, _piece(part, spec))

    def gather_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        out: Tensor,
        places: Tensor | None,
        found: Tensor | None = None,
    ) -> Tensor:
        return self._holder(tables).gather_tables(tables, offsets, keys, out, places, found)

    def find_tables(self, tables: Sequence[str], offsets: Tensor, keys: Tensor) -> Tensor:
        return self._holder(tables).find_tables(tables, offsets, keys)

    def sizes(self, tables: Sequence[str]) -> Tensor:
        return self._holder(tables).sizes(tables)

    def scatter_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        records: Tensor,
        places: Tensor | None,
        step: int | Tensor,
    ) -> None:
        self.write(self.store, tables, offsets, keys, records, places, step)

    def open_writer(self) -> Writer:
        return _ReplicaWriter(self, self.store.open_writer())

    def write(
        self,
        target: RowStore | Writer,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        records: Tensor,
        places: Tensor | None,
        step: int | Tensor,
    ) -> None:
        """Writes records to the copies, and those that this rank owns to the target."""
        if not self._has(tables):
            target.scatter_tables(tables, offsets, keys, records, places, step)
            return
        self.copies.scatter_tables(tables, offsets, keys, records, places, step)
        own, own_offsets = self._owned(tables, offsets, keys)
        own_places = own if places is None else places[own]
        own_step = step[own] if isinstance(step, Tensor) else step
        target.scatter_tables(tables, own_offsets, keys[own], records, own_places, own_step)

    def _owned(self, tables: Sequence[str], offsets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices of the keys that this rank owns, and the first of each table among them."""
        mesh, owned = self._world.mesh, []
        for name, (first, end) in zip(tables, pairwise(offsets.tolist()), strict=True):
            order, counts = group_by_owner(name, keys[first:end], mesh.num_shards)
            owned.append(first + order.split(counts.tolist())[mesh.shard])
        ends = torch.tensor([0, *map(len, owned)]).cumsum(0)
        return torch.cat(owned), ends

    def _holder(self, tables: Sequence[str]) -> RowStore:
        return self.copies if self._has(tables) else self.store

    def _has(self, tables: Sequence[str]) -> bool:
        """Returns whether tables are replicated. A call is about the tables of one group, which are alike."""
        return tables[0] in self.tables

    def _empty(self) -> HostStore:
        copies = HostStore(self.store.num_threads)
        for name in sorted(self.tables):
            copies.create_table(self.store.spec(name))
        return copies


class _ReplicaWriter(Writer):
    """The only writer of the store of a run, and of the copies."""

    def __init__(self, store: ReplicaStore, writer: Writer) -> None:
        self._store = store
        self._writer = writer

    @property
    def can_update(self) -> bool:
        """Returns False: a record that is replicated changes in two places."""
        return False

    def scatter_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        records: Tensor,
        places: Tensor | None,
        step: int | Tensor,
    ) -> None:
        self._store.write(self._writer, tables, offsets, keys, records, places, step)

    def close(self) -> None:
        self._writer.close()


def with_replicas(
    store: Store, features: FeatureGroups, world: World, earlier: RowStore | None
) -> Store | ReplicaStore:
    """Returns the store that training reads and writes: that of a run, unless some tables are replicated among several
    ranks. earlier: that of an earlier pipeline, which may go on with it."""
    tables = [name for group in features.groups if group.is_replicated for name in group.names]
    if world.size == 1 or not tables:
        return store
    if isinstance(earlier, ReplicaStore) and earlier.store is store:
        return earlier
    return ReplicaStore(store, tables, world)


def _piece(content: Tensor, spec: TableSpec) -> Piece:
    """Returns rows from the bytes of their keys, records and steps."""
    num_rows = len(content) // (KEY_BYTES + spec.record_bytes + STEP_BYTES)
    sizes = [num_rows * KEY_BYTES, num_rows * spec.record_bytes, num_rows * STEP_BYTES]
    keys, records, steps = (part.clone() for part in content.split(sizes))
    shape = num_rows, spec.num_columns
    return Piece(keys.view(torch.int64), records.view(spec.dtype).view(shape), steps.view(torch.int64))
