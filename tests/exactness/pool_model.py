"""An executable model of the row pool: its rules, its lanes, and a device whose work runs later than it is launched.

The rules, each in one sentence:

R1   The newest record of a key is in one place: its slot if it is resident, else the host store.
R2   A slot of a batch in flight is no victim, and a batch is in flight until its update has run on the device.
R3   A victim's record is in the store before its slot is overwritten and before a retrieve reads its key again.
R4   A batch that was never applied makes nothing dirty and creates no key.
R5   Flush writes every dirty row and evicts none.
R6   The result does not depend on the capacity.
R7   Two consecutive batches always fit; route makes room for them, and a lack of slots is an error, never a wait.
R8   A slot becomes dirty once the host knows that the step was applied, and its record is written with its own step.
R9   max_rows counts the keys that are stored, resident and not yet stored, and claimed by batches in flight, each once.
R10  A key is in the index once its slot is filled, until the store has its record; a failed retrieve frees its slots.

A record is the tuple of the steps that have updated it, so a wrong, lost, doubled or stale update is visible. Lanes are
generators that yield wherever another lane can run. A stream is a queue of effects, which run in its order, each at a
random later time. RowPool is what the lanes do with the pool. pool_model_run.py trains with it, in an order that a seed
chooses, and compares every record that is sent, and the store after every flush, with training on a plain dict. Each of
SWITCHES breaks one rule, to show that this is noticed.

Left out: more than one rank (the pool of an owner sees its own keys alone), exchanges and micro-batches (the compute
stream stands for all streams between begin and update), exchange across batches, several groups and tables, fixed
budgets, staging memory, updates and flushes that fail halfway, writes by others while a fit is under way.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.exactness.pool_model_parts import NEW, Batch, Record, Slot, Slots, Store, StoreError
from tests.exactness.pool_model_time import Condition, RuleError, Stream, Work

SWITCHES = {
    "pool_survives_writes_by_others": ("R1", "wrong row"),
    "victims_from_batch_in_training": ("R2", "wrong row"),
    "hits_keep_last_use": (
        "R2: a slot that a batch found resident may be a victim while the batch trains",
        "wrong row",
    ),
    "batch_before_fit_in_flight": ("R2: the last batch of a fit counts as in flight in the next one", "no slot"),
    "batch_numbers_restart": ("R2: the batches of a second fit are older than those of the first", "no slot"),
    "host_stream_skips_update": ("R2: slots are reused before the update of their batch has run", "wrong row"),
    "retrieve_before_write_back": ("R3", "wrong row"),
    "evict_without_write": ("R3", "wrong row"),
    "fill_before_copy": ("R3: slots are filled before their old records are copied out", "wrong store"),
    "write_one_stretch_late": ("R3: a retrieve may read a key before its record is written", "wrong row"),
    "unapplied_is_dirty": ("R4", "wrong store"),
    "retrieve_creates_keys": ("R4", "wrong store"),
    "flush_evicts": ("R5", "wrong row"),
    "flush_forgets": ("R5: flush makes slots clean that it has not written", "wrong store"),
    "flush_skips_last_step": ("R5: flush does not ask for the outcome of the last step", "wrong store"),
    "capacity_of_one_batch": ("R7", "no slot"),
    "wait_for_slots": ("R7: the capacity is that of one batch, and retrieve waits for slots", "deadlock"),
    "dirty_at_launch": ("R8", "wrong store"),
    "masked_step_makes_clean": ("R8", "wrong store"),
    "step_of_last_batch": ("R8", "wrong store"),
    "unstored_not_counted": ("R9", "wrong count"),
    "claims_not_counted": ("R9", "wrong count"),
    "indexed_before_filled": ("R10", "wrong place"),
    "leave_before_write": ("R10", "wrong place"),
    "failed_retrieve_keeps_slots": ("R10", "lost slot"),
    "send_skips_fill": ("R10: the compute stream does not wait for the host stream", "wrong row"),
}
"""Ways to break a rule: the rule, and a failure that shows it."""


@dataclass
class RowPool:
    """The pool of one owner. It outlives a fit."""

    store: Store
    stretch: int
    """Slots that are written out or filled at a time."""
    is_clean_first: bool
    """Victims are clean slots first, else the least recently used ones, dirty or not. Either is right."""
    broken: str | None
    """The switch that is on, if any."""
    slots: Slots = field(default_factory=Slots)
    seen: Counter[str] = field(default_factory=Counter)
    """What has happened, so that tests can show that it does."""
    _num_pulled: int = 0
    _num_writes: int = 0
    """Writes to the store up to the end of the last fit."""
    _postponed: list[tuple[int, Record, int]] = field(default_factory=list)

    def breaks(self, switch: str) -> bool:
        assert switch in SWITCHES
        return self.broken == switch

    def open(self, batches: Sequence[list[int] | None], max_rows: int, compute: Stream, host: Stream) -> list[Batch]:
        """Begins a fit. Returns its batches, numbered from where the last fit ended."""
        if self._num_writes != self.store.num_writes and not self.breaks("pool_survives_writes_by_others"):
            self.slots.clear()
        first = 0 if self.breaks("batch_numbers_restart") else self._num_pulled
        self._batches = [Batch(first + i, keys) for i, keys in enumerate(batches)]
        self._num_pulled += len(batches)
        self._max_rows, self._compute, self._host = max_rows, compute, host
        return self._batches

    def close(self) -> None:
        """Ends a fit, after a flush."""
        self._num_writes = self.store.num_writes

    # ---- the route lane ----

    def route(self, i: int) -> Work:
        """Settles the capacity for a batch and the one before it."""
        yield None
        capacity = self.num_needed(i)
        self.seen["growth"] += capacity > self.slots.capacity
        self.slots.grow(capacity)
        self._batches[i].routed.done = True

    def num_needed(self, i: int) -> int:
        """Returns the slots that a batch and those in flight with it need."""
        is_for_one = self.broken in ("capacity_of_one_batch", "wait_for_slots")
        return len(self._keys(self._batches[i : i + 1] if is_for_one else self._in_flight(i)))

    def _in_flight(self, i: int) -> list[Batch]:
        """Returns the batch in training, if there is one, and the batch that is retrieved meanwhile."""
        return self._batches[max(i - 1, 0) : i + 1]

    def _keys(self, batches: Sequence[Batch]) -> set[int]:
        return {key for batch in batches for key in batch.keys or []}

    # ---- the host lane: write_back(b - 1), then retrieve(b + 1), while b trains ----

    def write_back(self, i: int) -> Work:
        batch = self._batches[i]
        if batch.updated is not None and not self.breaks("host_stream_skips_update"):
            self._host.wait(batch.updated)
        yield from self._settle(batch)

    def _settle(self, batch: Batch) -> Work:
        """Learns the outcome of a step, and makes its slots dirty if it was applied."""
        if batch.updated is None or batch.is_settled:
            return
        yield batch.decided
        batch.is_settled = True
        if not batch.is_masked and not self.breaks("dirty_at_launch"):
            self.make_dirty(batch)
        if batch.is_masked and self.breaks("masked_step_makes_clean"):
            for number in batch.slots:
                self.slots.known[number].is_dirty = False

    def make_dirty(self, batch: Batch) -> None:
        for number in batch.slots:
            slot = self.slots.known[number]
            slot.is_dirty, slot.step = True, batch.step

    def _make_clean(self, number: int) -> None:
        slot = self.slots.known[number]
        slot.is_dirty, slot.is_stored = False, True

    def retrieve(self, i: int) -> Work:
        batch = self._batches[i]
        yield batch.routed
        if batch.keys is not None:
            try:
                batch.has_room = self._has_room(i)
                yield from self._make_resident(i, batch.keys)
                batch.slots = [self._slot(key) for key in batch.keys]
            except StoreError:
                batch.has_failed = True
                self.seen["failed retrieve"] += 1
                if not self.breaks("failed_retrieve_keeps_slots"):
                    self.slots.release_taken()
        batch.filled = self._host.mark()
        batch.retrieved.done = True

    def _slot(self, key: int) -> int:
        if key not in self.slots.index:
            raise RuleError(f"no slot: key {key} was given up by the batch that needs it")
        return self.slots.index[key]

    def _has_room(self, i: int) -> bool:
        """Returns whether the table has room for this batch, if the one in training is applied."""
        stored = self.store.rows.keys()
        resident = [self.slots.known[number] for number in self.slots.index.values()]
        unstored = {slot.key for slot in resident if slot.is_dirty and not slot.is_stored}
        if self.breaks("unstored_not_counted"):
            unstored.clear()
        claimed = self._keys(self._batches[i : i + 1] if self.breaks("claims_not_counted") else self._in_flight(i))
        return len(stored) + len(unstored | (claimed - stored)) <= self._max_rows

    def _make_resident(self, i: int, keys: Sequence[int]) -> Work:
        slots, number = self.slots, self._batches[i].number
        for key in keys:
            if key in slots.index and not self.breaks("hits_keep_last_use"):
                slots.known[slots.index[key]].last_use = number
        misses = [key for key in keys if key not in slots.index]
        if self.breaks("wait_for_slots"):
            yield Condition(lambda: len(slots.free) + len(self._victims(i)) >= len(misses))
        victims = self._victims(i)[: max(0, len(misses) - len(slots.free))]
        given = [*slots.free, *victims][: len(misses)]
        if len(given) < len(misses):
            raise RuleError(f"no slot: batch {number} has {len(misses)} misses, but can have {len(given)} slots")
        dirty = [(n, slots.known[n]) for n in victims if slots.known[n].is_dirty]
        self.seen["dirty victims"] += len(dirty) > 0
        self.seen["clean victims"] += len(victims) > len(dirty)
        # Dirty victims leave the index after they were written, all others at once.
        leaves_late = self.broken not in ("fill_before_copy", "leave_before_write", "evict_without_write")
        for n in set(given) - {n for n, _ in dirty} if leaves_late else given:
            slots.take(n)
        write_out = self._write_out(dirty, self._host, slots.take if leaves_late else lambda number: None)
        if self.broken not in ("fill_before_copy", "evict_without_write"):
            yield from write_out
        yield from self._fill(number, misses, given)
        if self.breaks("fill_before_copy"):
            yield from write_out

    def _victims(self, i: int) -> list[int]:
        """Returns the slots that no batch in flight uses, in the order in which they are given up."""
        oldest = self._oldest_in_flight(i)
        known = self.slots.known
        victims = [n for n in self.slots.index.values() if known[n].last_use < oldest]
        return sorted(victims, key=lambda n: (self.is_clean_first and known[n].is_dirty, known[n].last_use, n))

    def _oldest_in_flight(self, i: int) -> int:
        """Returns the number of the first batch whose slots are no victims."""
        if self.breaks("victims_from_batch_in_training"):
            return self._batches[i].number
        if self.breaks("batch_before_fit_in_flight"):
            return self._batches[i].number - 1
        return self._in_flight(i)[0].number

    def _write_out(self, slots: Sequence[tuple[int, Slot]], stream: Stream, after_write: Callable[[int], None]) -> Work:
        """Copies records out of their slots and writes them to the store, in stretches."""
        for start in range(0, len(slots), self.stretch):
            stretch = slots[start : start + self.stretch]
            yield None
            records: list[Record] = []
            yield stream.launch(partial(self._copy_out, [number for number, _ in stretch], records))
            entries = [(slot.key, record, slot.step) for (_, slot), record in zip(stretch, records, strict=True)]
            if self.breaks("step_of_last_batch"):
                last_step = max(batch.step for batch in self._batches)
                entries = [(key, record, last_step) for key, record, _ in entries]
            if self.breaks("write_one_stretch_late"):
                entries, self._postponed = self._postponed, entries
            self.store.write(entries)
            for number, _ in stretch:
                after_write(number)

    def _fill(self, number: int, misses: Sequence[int], given: Sequence[int]) -> Work:
        """Gathers records from the store into the given slots, in stretches."""
        for start in range(0, len(misses), self.stretch):
            keys, stretch = misses[start : start + self.stretch], given[start : start + self.stretch]
            if self.breaks("indexed_before_filled"):
                self._enter(number, keys, stretch)
            yield None
            rows = self.store.gather(keys)
            if self.breaks("retrieve_creates_keys"):
                self.store.write([(key, *row) for key, row in zip(keys, rows, strict=True)])
            yield None
            self._host.launch(partial(self._copy_in, stretch, [record for record, _ in rows]))
            if not self.breaks("indexed_before_filled"):
                self._enter(number, keys, stretch)

    def _enter(self, number: int, keys: Sequence[int], stretch: Sequence[int]) -> None:
        for key, n in zip(keys, stretch, strict=True):
            _, step = self.store.rows.get(key, NEW)
            self.slots.enter(n, Slot(key, step, last_use=number, is_stored=key in self.store.rows))

    def _copy_out(self, stretch: Sequence[int], records: list[Record]) -> None:
        records += [self.slots.records[n] for n in stretch]

    def _copy_in(self, stretch: Sequence[int], records: Sequence[Record]) -> None:
        for n, record in zip(stretch, records, strict=True):
            self.slots.records[n] = record

    # ---- the compute lane, while the other lanes are idle ----

    def flush(self) -> Work:
        """Settles the steps that were applied and writes all dirty slots."""
        fault, self.store.calls_until_fault = self.store.calls_until_fault, -1
        applied = [batch for batch in self._batches if batch.updated is not None]
        for batch in applied[:-1] if self.breaks("flush_skips_last_step") else applied:
            yield from self._settle(batch)
        for batch in self._batches:
            if batch.updated is None and self.breaks("unapplied_is_dirty"):
                self.make_dirty(batch)
        dirty = [(n, self.slots.known[n]) for n in self.slots.index.values() if self.slots.known[n].is_dirty]
        if self.breaks("flush_forgets") and dirty:
            forgotten, _ = dirty.pop()
            self._make_clean(forgotten)
        yield from self._write_out(dirty, self._compute, self._make_clean)
        if self.breaks("flush_evicts"):
            self.slots.clear()
        self.store.write(self._postponed)
        self._postponed = []
        self.store.calls_until_fault = fault
        self.seen["flush"] += 1
