"""What the model of the row pool is made of: the store, slots, batches, and what happens in a fit."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.exactness.pool_model_time import Event, RuleError

Record = tuple[Hashable, ...]
"""The updates of a row. An update is its step; with several ranks, also the gradients that were summed. A negative
number is a write by others."""
Rows = dict[int, tuple[Record, int]]
"""Record and step of its last update, by key."""
Keys = list[int] | None
"""Keys of a batch; None if it is not a step."""

NEW: tuple[Record, int] = ((), -1)
UNFILLED: Record = (-99,)


class StoreError(Exception):
    """The host store failed."""


@dataclass
class Store:
    rows: Rows = field(default_factory=dict)
    num_writes: int = 0
    calls_until_fault: int = -1
    """The call that brings it to 0 fails."""

    def write(self, entries: Sequence[tuple[int, Record, int]]) -> None:
        """Writes (key, record, step). If it fails, it has written a part."""
        is_failing = self._is_failing()
        for key, record, step in entries[:-1] if is_failing else entries:
            self.rows[key] = record, step
            self.num_writes += 1
        if is_failing:
            raise StoreError

    def gather(self, keys: Sequence[int]) -> list[tuple[Record, int]]:
        if self._is_failing():
            raise StoreError
        return [self.rows.get(key, NEW) for key in keys]

    def _is_failing(self) -> bool:
        self.calls_until_fault -= 1
        return self.calls_until_fault == 0


@dataclass
class Slot:
    """What the host knows of a slot. Its record is in the device's memory."""

    key: int = -1
    step: int = -1
    """Step of its record, as far as the host knows."""
    last_use: int = -1
    """Number of the last batch that was given the slot."""
    is_dirty: bool = False
    is_stored: bool = False
    """True if the store has the key, be it with an older record."""


@dataclass
class Slots:
    """All slots. Each is free, in the index, or taken by the retrieve under way."""

    records: list[Record] = field(default_factory=list)
    """The device's memory: effects alone read and write it."""
    known: list[Slot] = field(default_factory=list)
    """What the host knows of each."""
    index: dict[int, int] = field(default_factory=dict)
    """Slot of each resident key."""
    free: list[int] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)

    @property
    def capacity(self) -> int:
        return len(self.known)

    def grow(self, capacity: int) -> None:
        for number in range(self.capacity, capacity):
            self.known.append(Slot())
            self.records.append(UNFILLED)
            self.free.append(number)

    def take(self, number: int) -> None:
        if number in self.free:
            self.free.remove(number)
        else:
            del self.index[self.known[number].key]
        self.taken.add(number)

    def enter(self, number: int, slot: Slot) -> None:
        self.known[number] = slot
        self.index[slot.key] = number
        self.taken.remove(number)

    def release_taken(self) -> None:
        self.free += sorted(self.taken)
        self.taken.clear()

    def check(self) -> None:
        if len(self.free) + len(self.index) + len(self.taken) != self.capacity:
            raise RuleError(f"lost slot: {self.free} free, {self.index} resident, {self.taken} taken")

    def check_clean(self, store: Store) -> None:
        """Checks what the host knows of the slots, between fits."""
        if sorted([*self.free, *self.index.values()]) != list(range(self.capacity)):
            raise RuleError(f"lost slot: {self.free} free, {self.index} resident, not {self.capacity} slots")
        for key, number in self.index.items():
            slot, (_, step) = self.known[number], store.rows.get(key, NEW)
            if (slot.key, slot.step, slot.is_dirty, slot.is_stored) != (key, step, False, key in store.rows):
                raise RuleError(f"wrong slot: {slot} has key {key}, and the store has its step {step}")

    def clear(self) -> None:
        self.free += self.index.values()
        self.index.clear()


@dataclass
class Batch:
    number: int
    keys: Keys
    routed: Event = field(default_factory=Event)
    retrieved: Event = field(default_factory=Event)
    filled: Event | None = None
    """Mark in the host stream after the last record."""
    slots: list[int] = field(default_factory=list)
    has_failed: bool = False
    has_room: bool = True
    step: int = -1
    decided: Event | None = None
    """Mark in the compute stream: the outcome can be read. The update runs later."""
    updated: Event | None = None
    is_masked: bool = False
    is_settled: bool = False
    """True once the host knows the outcome."""

    @property
    def is_known_masked(self) -> bool:
        return self.is_settled and self.is_masked


@dataclass(frozen=True)
class Fit:
    """What happens in a fit. Steps count from its first one."""

    batches: list[Keys]
    num_steps: int
    """Steps after which it stops, however many batches there are."""
    flushes: set[int]
    """Steps after which it flushes."""
    bad_step: int | None
    """Step that is not finite. On a device, all later steps are masked, too."""
    max_rows: int
    fault: int
    """Call of the store in the host lane that fails; negative if none does."""


def choose_fit(draw: Random, keys: list[int], untrained: list[Keys]) -> Fit:
    """Returns a fit that may begin with the batches that the one before has left untrained."""
    num_batches = draw.randint(2, 10)
    largest = draw.randint(1, len(keys) // 2 + 1)
    batches = [sorted(draw.sample(keys, draw.randint(1, largest))) for _ in range(num_batches)]
    stream = draw.choice(["random", "random", 1, 2, 3, "disjoint"])
    if isinstance(stream, int):  # the period
        batches = [batches[i % min(stream, num_batches)] for i in range(num_batches)]
    if stream == "disjoint":
        size = max(1, len(keys) // 3)
        batches = [[keys[(i * size + j) % len(keys)] for j in range(size)] for i in range(num_batches)]
    new: list[Keys] = [draw.choices([batch, [], None], [12, 1, 1])[0] for batch in batches]
    return Fit(
        batches=untrained + new if draw.random() < 0.5 else new,
        num_steps=draw.randint(0, num_batches) if draw.random() < 0.3 else 99,
        flushes={draw.randrange(num_batches)} if draw.random() < 0.4 else set(),
        bad_step=draw.randrange(num_batches) if draw.random() < 0.2 else None,
        max_rows=draw.randint(len(keys) // 2, len(keys)) if draw.random() < 0.4 else 99,
        fault=draw.randint(1, 12) if draw.random() < 0.25 else -1,
    )


def train_plainly(rows: Rows, fit: Fit, first_step: int) -> tuple[list[Rows], int | None]:
    """The oracle: trains on a plain dict, batch by batch.

    Returns the rows before each step and after the last one that counts, and the step that max_rows refuses."""
    states = [dict(rows)]
    for keys in fit.batches:
        if keys is None:
            continue
        before, number = states[-1], len(states) - 1
        step = first_step + number
        after = before | {key: ((*before.get(key, NEW)[0], step), step) for key in keys}
        if len(after) > fit.max_rows:
            return states, number
        if number == fit.bad_step:
            break
        states.append(after)
    return states, None
