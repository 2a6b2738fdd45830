"""The row pool: rows stay in their slots on the device, as long as there is room for them.

A batch is a list of slots, in order of its owned keys. A key that is resident keeps its slot, so nothing is copied for
keys that consecutive batches share. Other keys get free slots, or those of keys that no batch in flight uses, least
recently used first. Only the records of such victims are written to the host store, and only those of missing keys are
read from it. docs/row-pool.md has the rules that make the result independent of the number of slots.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.device.growing import GrowingArray
from nestpipe.device.tally import embedding_memory
from nestpipe.embedding.capacity import Capacity, PoolSize
from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.replica import TouchedKeys
from nestpipe.embedding.resident import (
    Growth,
    ResidentBatch,
    ResidentRows,
    offsets_within,
    table_full_error,
)
from nestpipe.store import Writer, match_tables
from nestpipe.store.interface import MOST_ROWS, RowStore
from nestpipe.store.native.slot_ops import Assignment, SlotIndex, SlotRecords, Use

_THREADS_BESIDE = 4
"""Threads that see to the slots while the host store gathers. They need less time than it does."""


class RowPool:
    """See Residence. A rank has one. It outlives a run, and has nothing to write between runs."""

    def __init__(self, groups: Sequence[TableGroup], store: RowStore, memory: Memory, capacity: Capacity) -> None:
        self.store = store
        self.capacity = capacity
        self.num_rows = 0
        """Resident rows after the last retrieve. A number of its own: the index may be in use by the host lane."""
        self._writes = _Writes(store)
        self._groups = [GroupPool(group, store, self._writes, memory) for group in groups]
        self._bounded = [g for g, group in enumerate(groups) if not group.is_replicated]
        """Groups that share the capacity. All rows of the others stay."""
        self._memory = memory
        self._growing = threading.Lock()
        self._num_batches = 0
        self._in_flight: list[int] = []
        """Batches that are resident and whose outcome is not known."""
        self._is_retrieving = False

    @property
    def is_limited(self) -> bool:
        return self.capacity.limit_bytes is not None

    @property
    def num_bytes(self) -> int:
        """Returns the memory of all slots."""
        return sum(pool.records.num_bytes for pool in self._groups)

    # ---- capacity ----

    def growth(self, earlier: Sequence[Sequence[TouchedKeys]], current: Sequence[TouchedKeys]) -> Growth:
        needed = [pool.num_needed([dedups[g] for dedups in earlier], current[g]) for g, pool in enumerate(self._groups)]
        with self._growing:
            growth = self.capacity.growth([needed[g] for g in self._bounded], self._sizes())
            num_slots = [max(number, pool.num_slots) for number, pool in zip(needed, self._groups, strict=True)]
            for g, number in zip(self._bounded, growth.num_slots, strict=True):
                num_slots[g] = number
            return Growth(tuple(num_slots), growth.num_bytes, growth.error)

    def grow(self, growth: Growth) -> None:
        with self._growing:
            for pool, number in zip(self._groups, growth.num_slots, strict=True):
                pool.grow(number)

    def expand(self, most_bytes: int | None) -> None:
        with self._growing:
            most_slots = self.capacity.expansion(self._sizes(), most_bytes)
            for g, number in zip(self._bounded, most_slots, strict=True):
                self._groups[g].most_slots = number

    def _sizes(self) -> list[PoolSize]:
        pools = [self._groups[g] for g in self._bounded]
        return [PoolSize(pool.num_slots, pool.most_slots, pool.records.row_bytes) for pool in pools]

    # ---- a run ----

    def open(self, writer: Writer | RowStore) -> None:
        has_foreign = self._writes.has_foreign()
        self._writes.writer = writer
        for pool in self._groups:
            pool.records.count()
        self.flush()  # a run that failed may have left something
        if has_foreign or self._is_retrieving or self._in_flight:
            self.forget()
        self._writes.accept_foreign()

    def close(self) -> None:
        self._writes.writer = self.store

    def flush(self) -> None:
        for pool in self._groups:
            pool.flush()

    def forget_replicas(self) -> None:
        for g, pool in enumerate(self._groups):
            if g not in self._bounded:
                pool.index.clear()

    def forget(self) -> None:
        for pool in self._groups:
            pool.index.clear()
        self._in_flight.clear()
        self._is_retrieving = False
        self.num_rows = 0

    # ---- batches ----

    def retrieve(self, dedups: Sequence[TouchedKeys]) -> ResidentBatch:
        self._num_batches += 1
        batch = ResidentBatch([], self._num_batches)
        first_in_flight = min(self._in_flight, default=batch.number)
        self._is_retrieving = True  # stays so if the user interrupts the call, whose state is then not known
        try:
            for pool, dedup in zip(self._groups, dedups, strict=True):
                with self._growing:
                    pool.grow_for(len(dedup.keys))
                pool.retrieve(dedup, batch, first_in_flight)
        except Exception:
            self._is_retrieving = False
            raise
        batch.new_rows = [
            pool.index.claim(rows.host_slots)
            for pool, rows in zip(self._groups, batch.groups, strict=True)
            if rows.host_slots is not None
        ]
        self._is_retrieving = False
        self._in_flight.append(batch.number)
        self.num_rows = sum(pool.index.num_resident for pool in self._groups)
        return batch

    def room_error(self, batch: ResidentBatch) -> Exception | None:
        if self._writes.has_foreign():
            return RuntimeError(
                "the store was written to while a pipeline is open on it, so that resident rows hide what was written; "
                "nothing of this step was applied. Write to the store between two runs"
            )
        for rows, num_new in zip(batch.groups, batch.new_rows, strict=True):
            if not rows.group.frozen:
                num_rows = self.store.sizes(rows.group.names) + num_new
                if (error := table_full_error(rows.group, num_rows)) is not None:
                    return error
        return None

    def settle(self, batch: ResidentBatch, step: int | None) -> None:
        for pool, rows in zip(self._groups, batch.groups, strict=True):
            assert rows.host_slots is not None
            pool.index.settle(rows.host_slots, None if rows.group.frozen else step)
        self._in_flight.remove(batch.number)


class _Writes:
    """The pool's writes to the store, counted: any other write makes resident rows outdated."""

    def __init__(self, store: RowStore) -> None:
        self.writer: Writer | RowStore = store
        self._store = store
        self._num_known = store.num_writes

    def scatter(
        self, group: TableGroup, records: SlotRecords, stretch: slice, array: Tensor, places: Tensor | None
    ) -> None:
        offsets, keys = offsets_within(records.offsets, stretch), records.keys[stretch]
        is_current = not self.has_foreign()
        try:
            columns = array[:, : group.num_columns]
            self.writer.scatter_tables(group.names, offsets, keys, columns, places, records.steps[stretch])
        finally:
            if is_current:
                self.accept_foreign()

    def has_foreign(self) -> bool:
        """Returns whether the store had writes that were not the pool's."""
        return self._store.num_writes != self._num_known

    def accept_foreign(self) -> None:
        self._num_known = self._store.num_writes


class GroupPool:
    """The slots of one table group."""

    def __init__(self, group: TableGroup, store: RowStore, writes: _Writes, memory: Memory) -> None:
        num_beside = store.num_threads if memory.is_host else min(store.num_threads, _THREADS_BESIDE)
        self.index = SlotIndex(group.salts, store.num_threads, num_beside)
        self.records: GrowingArray = memory.new_records(group.num_columns, group.dtype)
        self.num_slots = 0
        self.most_slots = MOST_ROWS if group.is_replicated else 0
        """Slots that the group may take when rows would have to leave otherwise."""
        self.memory = memory
        self._group = group
        self._store = store
        self._writes = writes

    def num_needed(self, earlier: Sequence[TouchedKeys], current: TouchedKeys) -> int:
        """Returns the slots that consecutive batches need, or more if the pool has those. earlier: at most two."""
        batches = [*earlier, current]
        num_keys = sum(len(batch.keys) for batch in batches)
        if num_keys <= self.num_slots:
            return num_keys
        for i, batch in enumerate(batches[1:], start=1):
            is_counted = [self._has(batches[j], batch) for j in range(i)]
            num_keys -= int(torch.stack(is_counted).any(dim=0).sum())
        return num_keys

    def _has(self, batch: TouchedKeys, other: TouchedKeys) -> Tensor:
        """Returns for each key of another batch whether a batch has it, too."""
        lists = batch.keys, batch.table_offsets, other.keys, other.table_offsets
        return match_tables(*lists, self._store.num_threads) >= 0

    def grow(self, num_slots: int) -> None:
        if num_slots > self.num_slots:
            self.records.grow(num_slots)
            self.index.grow(num_slots)
            self.num_slots = num_slots  # only now: if one of the two fails, the next call tries again

    def grow_for(self, num_keys: int) -> None:
        """Takes more slots, if it may, when so many missing keys would make rows leave."""
        num_slots, num_free = self.num_slots, self.index.num_free
        if num_free >= num_keys or num_slots >= self.most_slots:
            return
        wanted = num_slots + max(num_keys - num_free, num_slots // 4)
        try:
            self.grow(min(wanted, self.most_slots))
        except MemoryError:  # others have taken it: rows leave instead
            self.most_slots = num_slots

    def retrieve(self, dedup: TouchedKeys, batch: ResidentBatch, first_in_flight: int) -> None:
        """Makes the rows of a batch resident, and adds them to it."""
        swap = _Swap(self, dedup, batch.number, first_in_flight)
        if swap.num_arriving > 0:
            try:
                self.memory.swap_records(self.records.rows, swap)
            except BaseException:
                for stretch in swap.stretches:
                    stretch.release()
                raise
        host_slots = swap.use.slots
        slots = self.memory.upload_list(host_slots)
        embedding_memory.add(slots)
        rows = ResidentRows(dedup.group, dedup.keys, dedup.table_offsets, self.records.rows, slots, host_slots)
        batch.groups.append(rows)
        batch.num_retrieved_keys += swap.num_arriving
        batch.num_retrieved_bytes += swap.num_arriving * dedup.group.record_bytes
        batch.num_written_bytes += swap.num_leaving * dedup.group.record_bytes

    def write_back(self, records: SlotRecords, stretch: slice, array: Tensor, places: Tensor | None) -> None:
        self._writes.scatter(self._group, records, stretch, array, places)

    def gather(self, offsets: Tensor, keys: Tensor, array: Tensor, places: Tensor | None, is_stored: Tensor) -> None:
        columns = array[:, : self._group.num_columns]
        self._store.gather_tables(self._group.names, offsets, keys, columns, places, is_stored)

    def flush(self) -> None:
        dirty = self.index.dirty()

        def scatter(array: Tensor, stretch: slice, places: Tensor | None) -> None:
            self.write_back(dirty, stretch, array, places)
            self.index.clean(dirty.slots[stretch])

        if len(dirty.slots) > 0:
            self.memory.drain_records(self.records.rows, dirty.slots, scatter)


class _Swap:
    """See Swap. Missing keys of a batch that take the place of others."""

    def __init__(self, pool: GroupPool, dedup: TouchedKeys, batch: int, first_in_flight: int) -> None:
        self.use = pool.index.use(dedup.table_offsets, dedup.keys, batch, pool.memory.empty_list)
        self.num_arriving = len(self.use.missing_keys)
        self.stretches: list[_SwapStretch] = []
        self._pool = pool
        self._first_in_flight = first_in_flight
        self._is_stored = torch.empty(self.num_arriving, dtype=torch.bool)

    @property
    def num_leaving(self) -> int:
        return sum(len(stretch.leaving) for stretch in self.stretches)

    def gather(self, array: Tensor, stretch: slice, places: Tensor | None) -> None:
        offsets, keys = offsets_within(self.use.missing_offsets, stretch), self.use.missing_keys[stretch]
        self._pool.gather(offsets, keys, array, places, self._is_stored[stretch])

    def assign(self, stretch: slice) -> "_SwapStretch":
        lists = self.use, stretch, self._first_in_flight
        assignment = self._pool.index.assign(*lists, self._pool.memory.empty_list)
        self.stretches.append(_SwapStretch(self._pool, self.use, stretch, self._is_stored[stretch], assignment))
        return self.stretches[-1]


class _SwapStretch:
    """See SwapStretch."""

    def __init__(self, pool: GroupPool, use: Use, stretch: slice, is_stored: Tensor, assignment: Assignment) -> None:
        self.arriving = assignment.slots
        self.leaving = assignment.leaving.slots
        self._pool = pool
        self._use = use
        self._stretch = stretch
        self._is_stored = is_stored
        self._leaving = assignment.leaving
        self._num_held = len(self.arriving) - len(self.leaving)
        """Slots that may be overwritten: their records, if they had any, are in the host store."""
        self._is_filled = False

    def scatter(self, array: Tensor, stretch: slice, places: Tensor | None) -> None:
        self._pool.write_back(self._leaving, stretch, array, places)
        # Only now: the newest record of a key must be in its slot or in the store.
        self._pool.index.evict(self.leaving[stretch])
        self._num_held += stretch.stop - stretch.start

    def fill(self) -> None:
        """Adds the keys to the index. Only now: a key in the index must have its record in its slot."""
        offsets = offsets_within(self._use.missing_offsets, self._stretch)
        keys = self._use.missing_keys[self._stretch]
        self._pool.index.fill(offsets, keys, self.arriving, self._is_stored, self._use.batch)
        self._is_filled = True

    def release(self) -> None:
        """Frees slots, unless they were filled."""
        if not self._is_filled:
            self._pool.index.release(self.arriving[: self._num_held])
