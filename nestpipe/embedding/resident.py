"""Resident rows: the owned rows of a batch, in the memory where they are trained.

Each of two consecutive batches has its own resident rows. Records of keys that are in both, the overlap, are copied
from one to the other: they are neither written back after one batch nor retrieved from the host store for the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestpipe.device.tally import embedding_memory
from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.route import OwnerDedup
from nestpipe.store import Store, Writer, match_tables, unique


@dataclass(frozen=True)
class Overlap:
    """The keys of one group that a batch shares with the previous batch."""

    previous_slots: Tensor
    """Slots in the previous batch."""
    slots: Tensor
    """Slots of the same keys in this batch, ascending."""
    on_device: tuple[Tensor, Tensor]
    """`previous_slots` and `slots`, copied to the memory of the rows."""


@dataclass
class ResidentRows:
    """One group of a batch. Slot i has the record of the i-th owned key; the slots of a table are contiguous."""

    group: TableGroup
    keys: Tensor
    table_offsets: Tensor
    """[tables + 1] first slot of each table."""
    records: Tensor
    """[slots, columns]; on a device there may be columns of zeros behind a record."""
    is_stored: Tensor
    """[slots] True if the key has been trained before."""
    mirror: Tensor | None = None
    """Pinned host memory of the same shape, for records on a device."""
    shown: Tensor | None = None
    """Rows that the model sees instead of those in `records`, for experiments with stale rows."""

    @property
    def rows(self) -> Tensor:
        return self.records[:, : self.group.dim]

    @property
    def state(self) -> Tensor:
        return self.records[:, self.group.dim : self.group.num_columns]

    @property
    def frozen_rows(self) -> Tensor:
        """Returns the rows that requesters get, from the first row sent to the last gradient returned."""
        return self.rows if self.shown is None else self.shown

    def offsets_of(self, stretch: slice, slots: Tensor | None) -> Tensor:
        """Returns the offsets of the tables among these slots, or in the whole stretch."""
        if slots is None:
            offsets: Tensor = self.table_offsets.clamp(stretch.start, stretch.stop) - stretch.start
            return offsets
        return torch.from_numpy(np.searchsorted(slots.numpy(), self.table_offsets.numpy()))


class RecordMemory:
    """Memory for the records of one batch, reused for the batch after the next: new memory costs page faults, and
    pinned memory even more."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._arrays: dict[str, tuple[Tensor, Tensor | None]] = {}

    def reserve(self, dedup: OwnerDedup) -> ResidentRows:
        """Returns slots for these keys, with uninitialised records."""
        group, num_slots = dedup.group, len(dedup.keys)
        records, mirror = self._arrays.get(group.names[0], (None, None))
        if records is None or len(records) < num_slots:
            records, mirror = self.memory.empty_records(num_slots + num_slots // 4, group.num_columns, group.dtype)
            self._arrays[group.names[0]] = (records, mirror)
            embedding_memory.add(records)
        is_stored = torch.ones(num_slots, dtype=torch.bool)
        mirrored = None if mirror is None else mirror[:num_slots]
        return ResidentRows(group, dedup.keys, dedup.table_offsets, records[:num_slots], is_stored, mirrored)


def find_overlap(previous: Sequence[OwnerDedup], current: Sequence[OwnerDedup], memory: Memory) -> list[Overlap]:
    """Finds the keys that two consecutive batches share, by group."""
    pairs = [_shared_slots(before, after) for before, after in zip(previous, current, strict=True)]
    uploaded = memory.upload(_Slots([slots for pair in pairs for slots in pair])).slots
    on_device = zip(uploaded[::2], uploaded[1::2], strict=True)
    return [Overlap(*pair, uploaded_pair) for pair, uploaded_pair in zip(pairs, on_device, strict=True)]


@dataclass(frozen=True)
class _Slots:
    slots: list[Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> "_Slots":
        return _Slots([function(slots) for slots in self.slots])


def _shared_slots(before: OwnerDedup, after: OwnerDedup) -> tuple[Tensor, Tensor]:
    previous_slots = match_tables(before.keys, before.table_offsets, after.keys, after.table_offsets)
    slots = (previous_slots >= 0).nonzero().flatten()
    return previous_slots[slots], slots


def retrieve_rows(
    dedups: Sequence[OwnerDedup], store: Store, arrays: RecordMemory, overlap: Sequence[Overlap] | None = None
) -> list[ResidentRows]:
    """Makes the rows of a batch resident. Creates no key in the store: a missing key gets its initial record.

    Slots of the overlap are not filled: sync_overlap does that.
    """
    overlaps = overlap if overlap is not None else [None] * len(dedups)
    return [_retrieve(dedup, store, arrays, shared) for dedup, shared in zip(dedups, overlaps, strict=True)]


def _retrieve(dedup: OwnerDedup, store: Store, arrays: RecordMemory, overlap: Overlap | None) -> ResidentRows:
    resident, names = arrays.reserve(dedup), dedup.group.names
    slots = None if overlap is None or len(overlap.slots) == 0 else _all_but(overlap.slots, len(dedup.keys))

    def gather(array: Tensor, stretch: slice, chosen: Tensor | None) -> None:
        array, offsets = array[:, : dedup.group.num_columns], resident.offsets_of(stretch, chosen)
        if chosen is None:
            is_stored = resident.is_stored[stretch]
            store.gather_tables(names, offsets, dedup.keys[stretch], array[stretch], None, is_stored)
        else:
            resident.is_stored[chosen] = store.gather_tables(names, offsets, dedup.keys[chosen], array, chosen)

    arrays.memory.fill_records(resident.records, resident.mirror, slots, gather)
    return resident


def sync_overlap(
    previous: Sequence[ResidentRows], current: Sequence[ResidentRows], overlap: Sequence[Overlap], memory: Memory
) -> None:
    """Copies the records of the overlap, row and row state, from one batch to the next."""
    for source, target, shared in zip(previous, current, overlap, strict=True):
        memory.copy_rows(source.records, shared.on_device[0], target.records, shared.on_device[1])


def write_back(
    resident: Sequence[ResidentRows],
    store: Store | Writer,
    step: int,
    memory: Memory,
    slots: Sequence[Tensor | None] | None = None,
) -> None:
    """Writes records to the host store, all slots of a group or the given ones. Creates missing keys."""
    for rows, chosen in zip(resident, slots or [None] * len(resident), strict=True):
        if not rows.group.frozen:
            _write_back(rows, store, step, memory, chosen)


def _write_back(rows: ResidentRows, store: Store | Writer, step: int, memory: Memory, slots: Tensor | None) -> None:
    def scatter(array: Tensor, stretch: slice, chosen: Tensor | None) -> None:
        array, offsets = array[:, : rows.group.num_columns], rows.offsets_of(stretch, chosen)
        if chosen is None:
            store.scatter_tables(rows.group.names, offsets, rows.keys[stretch], array[stretch], None, step)
        else:
            store.scatter_tables(rows.group.names, offsets, rows.keys[chosen], array, chosen, step)

    memory.drain_records(rows.records, rows.mirror, slots, scatter)


def leaving(resident: Sequence[ResidentRows], overlap_with_next: Sequence[Overlap]) -> list[Tensor]:
    """Returns the slots of each group that the next batch does not need."""
    pairs = zip(resident, overlap_with_next, strict=True)
    return [_all_but(shared.previous_slots, len(rows.keys)) for rows, shared in pairs]


def _all_but(slots: Tensor, num_slots: int) -> Tensor:
    others = torch.ones(num_slots, dtype=torch.bool)
    others[slots] = False
    return others.nonzero().flatten()


def room_error(resident: Sequence[ResidentRows], previous: Sequence[ResidentRows], store: Store) -> ValueError | None:
    """Returns an error if a table has no room for these rows and those of the previous batch, not yet written back."""
    for i, rows in enumerate(resident):
        if rows.group.frozen:
            continue
        together = [rows, *previous[i : i + 1]]
        num_keys = sum(r.table_offsets.diff() for r in together)
        num_rows = store.sizes(rows.group.names)
        suspects = (num_rows + num_keys).numpy() > rows.group.most_rows  # if every key were new
        for t in np.flatnonzero(suspects).tolist():
            table = rows.group.tables[t]
            keys = torch.cat([r.keys[r.table_offsets[t] : r.table_offsets[t + 1]] for r in together])
            needed = int(num_rows[t]) + int((~store.find(table.name, unique(keys)[0])).sum())
            if needed > rows.group.most_rows[t]:
                return ValueError(_no_room(table.name, needed, table.max_rows, int(rows.group.most_rows[t])))
    return None


def _no_room(name: str, needed: int, max_rows: int | None, limit: int) -> str:
    most, remedy = f"the {limit} that a table can have on one rank", "Use more ranks"
    if max_rows is not None:
        most, remedy = f"its max_rows = {limit}", "Raise max_rows, or use more ranks"
    return (
        f"table {name!r} would have {needed} rows on this rank, more than {most}; nothing of this step was applied. "
        f"{remedy}"
    )
