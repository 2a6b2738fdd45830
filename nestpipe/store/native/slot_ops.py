"""The slots of a row pool: which key each slot holds, and what the store has of it.

Tensors are int64 and in host memory. Keys are ordered by table: table t has keys offsets[t] .. offsets[t + 1] - 1. They
are distinct, as are the slots of a list; that is not checked. A call that raises has changed nothing, unless it says
otherwise.
"""

import weakref
from collections.abc import Callable
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from nestpipe.store.interface import check_integer, check_step, check_threads
from nestpipe.store.native.library import (
    NativeMissingKeys,
    NativeSlotCounts,
    NativeSlotRecords,
    TableChangedError,
    call,
    pointer,
)
from nestpipe.store.native.plan_ops import check_values


@dataclass(frozen=True)
class SlotRecords:
    """Slots of some keys, table after table."""

    slots: Tensor
    keys: Tensor
    steps: Tensor
    """Step that last changed each record."""
    offsets: Tensor
    """[tables + 1]: table t has entries offsets[t] .. offsets[t + 1] - 1."""


@dataclass(frozen=True)
class Use:
    """The keys of a batch: those that are resident, and those that are not."""

    batch: int
    slots: Tensor
    """Slot of each key. `assign` writes those of missing keys."""
    missing: Tensor
    """Indices of missing keys, ascending."""
    missing_keys: Tensor
    missing_offsets: Tensor
    """[tables + 1]: table t has missing keys missing_offsets[t] .. missing_offsets[t + 1] - 1."""


@dataclass(frozen=True)
class Assignment:
    """Slots for missing keys of a batch."""

    slots: Tensor
    """Slot of each key."""
    leaving: SlotRecords
    """Dirty victims. The last len(leaving.slots) keys have their slots, in the same order, once they are evicted. The
    slots of all other keys may be overwritten at once."""


Allocate = Callable[[int], Tensor]
"""(number) -> uninitialised int64 tensor in host memory, contiguous."""


def _allocate(number: int) -> Tensor:
    return torch.empty(number, dtype=torch.int64)


class SlotIndex:
    """Maps keys to the slots of a row pool. Safe to call from several threads; calls run one at a time.

    A slot is free, taken (it belongs to a batch, which has not filled it yet) or resident (it holds a key). A key
    exists if the store has a record of it or if its slot is dirty. Batches are numbered from 1 upwards.

    salts: one for each table, as `table_salts` returns them. num_threads: threads that a call may use. num_beside:
    those of `assign`, `evict` and `fill`, which may run beside other work. Results do not depend on them.
    """

    def __init__(self, salts: Tensor, num_threads: int, num_beside: int | None = None) -> None:
        check_values("salts", salts, torch.int64)
        check_threads(num_threads)
        num_beside = num_threads if num_beside is None else num_beside
        self._num_tables = len(salts)
        self._slots = c_void_p()
        call("slots_create", pointer(salts), len(salts), num_threads, num_beside, byref(self._slots))
        finalizer = weakref.finalize(self, call, "slots_destroy", self._slots)
        finalizer.atexit = False  # at exit a daemon thread may still be in a call; the system frees the memory

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SlotIndex cannot be copied or pickled; make a new one")

    @property
    def num_slots(self) -> int:
        return int(self._counts().num_slots)

    @property
    def num_free(self) -> int:
        return int(self._counts().num_free)

    @property
    def num_resident(self) -> int:
        return int(self._counts().num_resident)

    def memory_bytes(self) -> int:
        """Returns the bytes of the index and of what is known of each slot."""
        return int(self._counts().memory_bytes)

    def grow(self, num_slots: int) -> None:
        """Adds free slots, so that there are `num_slots` in all."""
        check_integer("num_slots", num_slots, 0, 2**63 - 1)
        call("slots_grow", self._slots, num_slots)

    def find(self, offsets: Tensor, keys: Tensor) -> Tensor:
        """Returns the slot of each key, -1 if it is not resident. Changes nothing."""
        arguments = self._keys(offsets, keys)
        slots = torch.empty_like(keys)
        call("slots_find", *arguments, pointer(slots))
        return slots

    def use(self, offsets: Tensor, keys: Tensor, batch: int, allocate: Allocate = _allocate) -> Use:
        """Finds the slots of resident keys, which the batch uses from now on, and lists the other keys.

        allocate: makes the tensors, for example in pinned memory.
        """
        arguments = self._keys(offsets, keys)
        _check_number("batch", batch)
        slots, missing, missing_keys = (allocate(len(keys)) for _ in range(3))
        missing_offsets = torch.empty_like(offsets)
        native = NativeMissingKeys(pointer(missing), pointer(missing_keys), pointer(missing_offsets))
        call("slots_use", *arguments, batch, pointer(slots), byref(native))
        number = int(missing_offsets[-1])
        return Use(batch, slots, missing[:number], missing_keys[:number], missing_offsets)

    def assign(self, use: Use, stretch: slice, first_in_flight: int, allocate: Allocate = _allocate) -> Assignment:
        """Gives slots to a stretch of the missing keys of the last batch that `use` was called for: free ones, then
        those of clean victims, then those of dirty ones, table after table, each ascending.

        Victims are the least recently used slots whose last use was a batch before `first_in_flight`, and that no batch
        has claimed. Clean ones are no longer resident. Dirty ones are until `evict`; if that is not called, they stay
        and may be chosen again. Raises ValueError if there are too few slots.
        """
        _check_number("first_in_flight", first_in_flight)
        missing = use.missing[stretch]
        slots = allocate(len(missing))
        leaving, room = self._room(len(missing), allocate)
        batches = use.batch, first_in_flight
        keys = pointer(missing), len(missing), pointer(slots), pointer(use.slots), len(use.slots)
        call("slots_assign", self._slots, *batches, *keys, byref(room))
        return Assignment(slots, _cut(leaving))

    def evict(self, slots: Tensor) -> None:
        """Ends the stay of dirty victims, whose records are in the store now. Their slots belong to the batch that they
        were assigned to."""
        call("slots_evict", *self._list(slots))

    def fill(self, offsets: Tensor, keys: Tensor, slots: Tensor, is_stored: Tensor, batch: int) -> None:
        """Makes missing keys resident in slots that were assigned to them, and that hold their records now.

        is_stored: bool, False if the record is the initial one. batch: it has used the slots.
        """
        arguments = self._keys(offsets, keys)
        check_values("slots", slots, torch.int64, len(keys))
        check_values("is_stored", is_stored, torch.bool, len(keys))
        _check_number("batch", batch)
        call("slots_fill", *arguments, pointer(slots), pointer(is_stored), batch)

    def release(self, slots: Tensor) -> None:
        """Frees slots that were assigned and not filled."""
        call("slots_release", *self._list(slots))

    def claim(self, slots: Tensor) -> Tensor:
        """Claims the keys of a batch that do not exist. Returns for each table the number of keys that exist but are
        not stored, plus those that are claimed. Every batch claims its slots once, and settles them. If it raises, the
        slots for which it does are not claimed."""
        num_rows = torch.empty(self._num_tables, dtype=torch.int64)
        call("slots_claim", *self._list(slots), pointer(num_rows))
        return num_rows

    def settle(self, slots: Tensor, step: int | None) -> None:
        """Notes the outcome of a batch. `step`: it was applied, its slots are dirty and its keys exist. None: it was
        not; its claims are dropped. If it raises, the slots for which it does are not settled."""
        if step is not None:
            check_step(step)
        call("slots_settle", *self._list(slots), -1 if step is None else step)

    def dirty(self) -> SlotRecords:
        """Returns all dirty slots, ascending within a table."""
        while True:
            records, room = self._room(self._counts().num_dirty)
            try:
                call("slots_dirty", self._slots, byref(room))
            except TableChangedError:  # another thread settled a batch meanwhile
                continue
            return _cut(records)

    def clean(self, slots: Tensor) -> None:
        """Notes that the records of dirty slots are in the store now."""
        call("slots_clean", *self._list(slots))

    def clear(self) -> None:
        """Forgets all keys and the number of the last batch. All slots are free."""
        call("slots_clear", self._slots)

    def _counts(self) -> NativeSlotCounts:
        counts = NativeSlotCounts()
        call("slots_counts", self._slots, byref(counts))
        return counts

    def _keys(self, offsets: Tensor, keys: Tensor) -> tuple[c_void_p, int | None, int | None, int]:
        check_values("offsets", offsets, torch.int64, self._num_tables + 1)
        check_values("keys", keys, torch.int64)
        return self._slots, pointer(offsets), pointer(keys), len(keys)

    def _list(self, slots: Tensor) -> tuple[c_void_p, int | None, int]:
        check_values("slots", slots, torch.int64)
        return self._slots, pointer(slots), len(slots)

    def _room(self, capacity: int, allocate: Allocate = _allocate) -> tuple[SlotRecords, NativeSlotRecords]:
        """Returns room for slots, as tensors and as the native library takes it."""
        slots, keys, steps = (allocate(capacity) for _ in range(3))
        offsets = torch.empty(self._num_tables + 1, dtype=torch.int64)
        native = NativeSlotRecords(pointer(slots), pointer(keys), pointer(steps), pointer(offsets), capacity)
        return SlotRecords(slots, keys, steps, offsets), native


def _check_number(what: str, number: int) -> None:
    """Refuses what is not an integer of 64 bits. Native code checks its range."""
    check_integer(what, number, -(2**63), 2**63 - 1)


def _cut(records: SlotRecords) -> SlotRecords:
    """Returns the records that were written."""
    written = slice(int(records.offsets[-1]))
    return SlotRecords(records.slots[written], records.keys[written], records.steps[written], records.offsets)
