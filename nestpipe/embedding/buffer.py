"""The working set of an owner: the records of its owned keys of one batch, and what happens to them.

Consecutive batches have a buffer each, the active one in training and the prefetch buffer of the next. The records of
keys that are in both, the overlap, are copied from one to the other on the device: they are neither retrieved from the
host store for the next batch nor written back after this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.route import OwnedTable, Route
from nestpipe.embedding.table import Table
from nestpipe.store import HostStore, copy_records, unique


@dataclass(frozen=True)
class Overlap:
    """The keys of one table that a batch shares with the batch before it."""

    before: Tensor
    """slots in the buffer of the batch before"""
    here: Tensor
    """slots of the same keys in this one's"""


@dataclass
class Buffer:
    """Slot i has the record of the i-th owned key."""

    table: Table
    keys: Tensor
    records: Tensor
    found: Tensor
    """[n] whether the key has been trained before"""
    seen: Tensor | None = None
    """rows that the model is shown instead of those in `records`; for experiments with stale rows"""

    @property
    def rows(self) -> Tensor:
        return self.records[:, : self.table.dim]

    @property
    def state(self) -> Tensor:
        return self.records[:, self.table.dim :]

    @property
    def frozen_rows(self) -> Tensor:
        """What requesters get, all through the window."""
        return self.rows if self.seen is None else self.seen


class BufferMemory:
    """Memory for the buffers of one batch, used again for the batch after the next: new memory costs page faults."""

    def __init__(self) -> None:
        self._of_tables: dict[str, Tensor] = {}

    def records(self, table: Table, num_rows: int, num_columns: int) -> Tensor:
        memory = self._of_tables.get(table.name)
        if memory is None or len(memory) < num_rows:
            memory = torch.empty(num_rows + num_rows // 4, num_columns, dtype=table.dtype)
            self._of_tables[table.name] = memory
        return memory[:num_rows]


def find_overlap(before: Sequence[OwnedTable], here: Sequence[OwnedTable]) -> list[Overlap]:
    """Of each table."""
    return [_find_overlap(one.keys, other.keys) for one, other in zip(before, here, strict=True)]


def _find_overlap(before: Tensor, here: Tensor) -> Overlap:
    # The keys of a batch are distinct, and `unique` numbers keys as they come: the first ones keep their slots.
    numbers = unique(torch.cat([before, here]))[1][len(before) :]
    slots = (numbers < len(before)).nonzero().flatten()
    return Overlap(numbers[slots], slots)


def retrieve_rows(
    route: Route, store: HostStore, memory: BufferMemory | None = None, overlap: Sequence[Overlap] | None = None
) -> list[Buffer]:
    """Host store to buffer. Creates nothing: a missing key has its initial record in the buffer only.

    The slots of the overlap are left as they are: sync_overlap fills them.
    """
    memory = memory or BufferMemory()
    overlaps = overlap if overlap is not None else [None] * len(route.owned)
    return [_retrieve(owned, store, memory, o) for owned, o in zip(route.owned, overlaps, strict=True)]


def _retrieve(owned: OwnedTable, store: HostStore, memory: BufferMemory, overlap: Overlap | None) -> Buffer:
    name = owned.table.name
    records = memory.records(owned.table, len(owned.keys), store.spec(name).num_columns)
    if overlap is None or len(overlap.here) == 0:
        return Buffer(owned.table, owned.keys, *store.gather(name, owned.keys, out=records)[:2])
    rest = _all_but(overlap.here, len(owned.keys))
    found = torch.ones(len(owned.keys), dtype=torch.bool)
    found[rest] = store.gather_into(name, owned.keys[rest], records, rest)
    return Buffer(owned.table, owned.keys, records, found)


def sync_overlap(before: Sequence[Buffer], here: Sequence[Buffer], overlap: Sequence[Overlap]) -> None:
    """Record for record, row and row state, from the active buffer to the prefetch buffer."""
    for source, target, shared in zip(before, here, overlap, strict=True):
        copy_records(source.records, shared.before, target.records, shared.here)


def room_error(buffers: Sequence[Buffer], before: Sequence[Buffer], store: HostStore) -> ValueError | None:
    """Why these rows, and those of the batch before that are not written back yet, will not all have room."""
    for i, buffer in enumerate(buffers):
        table = buffer.table
        if table.max_rows is None or table.frozen:
            continue
        keys = torch.cat([b.keys for b in (buffer, *before[i : i + 1])])
        needed = store.size(table.name) + int((~store.find(table.name, unique(keys)[0])).sum())
        if needed > table.max_rows:
            return ValueError(
                f"table {table.name!r} would have {needed} rows on this rank, more than its max_rows = "
                f"{table.max_rows}; nothing of this step was applied. Raise max_rows, or use more ranks"
            )
    return None


def update_rows(buffers: Sequence[Buffer], gradients: Sequence[Tensor | None], step: int) -> None:
    """The row optimizer, once for each owned key, even where the gradient is zero. `step` counts from 1."""
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if gradient is not None:
            buffer.table.optimizer.apply(buffer.rows, buffer.state, gradient, step)


def write_back(
    buffers: Sequence[Buffer], store: HostStore, step: int, slots: Sequence[Tensor | None] | None = None
) -> None:
    """Buffer to host store, all slots of a table or those named; a key exists from here on."""
    for buffer, chosen in zip(buffers, slots or [None] * len(buffers), strict=True):
        if buffer.table.frozen:
            continue
        if chosen is None:
            store.scatter(buffer.table.name, buffer.keys, buffer.records, step)
        else:
            store.scatter_from(buffer.table.name, buffer.keys[chosen], buffer.records, chosen, step)


def leaving(buffers: Sequence[Buffer], overlap_with_next: Sequence[Overlap]) -> list[Tensor]:
    """The slots of each table that the next batch does not need."""
    return [_all_but(o.before, len(b.keys)) for b, o in zip(buffers, overlap_with_next, strict=True)]


def _all_but(slots: Tensor, num_slots: int) -> Tensor:
    others = torch.ones(num_slots, dtype=torch.bool)
    others[slots] = False
    return others.nonzero().flatten()
