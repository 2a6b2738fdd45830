"""SlotIndex in plain Python: the state of each slot in a list, and rules read off the documentation."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nestpipe.store.native.slot_ops import Assignment, SlotIndex, SlotRecords, Use

Key = tuple[int, int]
"""Table and key."""


class Keys(NamedTuple):
    """Keys as calls take them."""

    offsets: Tensor
    keys: Tensor

    @property
    def pairs(self) -> list[Key]:
        bounds, keys = self.offsets.tolist(), self.keys.tolist()
        return [(t, key) for t in range(len(bounds) - 1) for key in keys[bounds[t] : bounds[t + 1]]]

    def some(self, indices: list[int]) -> "Keys":
        return by_table([self.pairs[i] for i in indices], len(self.offsets) - 1)


def by_table(pairs: list[Key], num_tables: int) -> Keys:
    """Returns keys that are ordered by table."""
    counts = [sum(t == table for t, _ in pairs) for table in range(num_tables)]
    return Keys(torch.tensor([0, *counts]).cumsum(0), integers([key for _, key in pairs]))


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@dataclass(frozen=True)
class Admission:
    """What `use` and `assign` return."""

    use: Use
    assignment: Assignment

    @property
    def slots(self) -> Tensor:
        return self.use.slots


def admit(index: SlotIndex, keys: Keys, batch: int, first_in_flight: int) -> Admission:
    use = index.use(*keys, batch)
    return Admission(use, index.assign(use, slice(0, len(use.missing)), first_in_flight))


@dataclass
class Resident:
    key: Key
    is_stored: bool
    last_use: int
    number_of_use: int
    """Counts all uses: the order within a batch."""
    is_dirty: bool = False
    step: int = 0
    num_claims: int = 0
    is_leaving: bool = False

    @property
    def exists(self) -> bool:
        return self.is_stored or self.is_dirty


TAKEN = "taken"


class SlotModel:
    """Each slot is None (free), TAKEN, or a Resident. An admission that needs too many slots raises ValueError; other
    wrong calls fail an assertion."""

    def __init__(self, num_tables: int) -> None:
        self.num_tables = num_tables
        self.slots: list[Resident | str | None] = []
        self.num_uses = 0

    def residents(self) -> dict[int, Resident]:
        return {i: slot for i, slot in enumerate(self.slots) if isinstance(slot, Resident)}

    def resident(self, slot: int) -> Resident:
        held = self.slots[slot]
        assert isinstance(held, Resident)
        return held

    def free(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot is None]

    def grow(self, num_slots: int) -> None:
        self.slots += [None] * (num_slots - len(self.slots))

    def find(self, keys: Keys) -> Tensor:
        slots = {held.key: slot for slot, held in self.residents().items()}
        return integers([slots.get(pair, -1) for pair in keys.pairs])

    def _number(self) -> int:
        self.num_uses += 1
        return self.num_uses

    def admit(self, keys: Keys, batch: int, first_in_flight: int) -> Admission:
        slots = self.find(keys).tolist()
        for held in (self.resident(slot) for slot in slots if slot >= 0):
            held.is_leaving = False
            if held.last_use < batch:
                held.last_use, held.number_of_use = batch, self._number()
        missing = [i for i, slot in enumerate(slots) if slot < 0]
        free = self.free()[: len(missing)]
        victims = self._victims(first_in_flight)
        if len(free) + len(victims) < len(missing):
            raise ValueError(f"need {len(missing)} slots, but only {len(free) + len(victims)} are free or may be")
        victims = victims[: len(missing) - len(free)]
        clean = sorted(slot for slot in victims if not self.resident(slot).is_dirty)
        leaving = [slot for slot in victims if self.resident(slot).is_dirty]
        leaving.sort(key=lambda slot: (self.resident(slot).key[0], slot))
        for slot in free + clean:
            self.slots[slot] = TAKEN
        for slot in leaving:
            self.resident(slot).is_leaving = True
        for i, slot in zip(missing, free + clean + leaving, strict=True):
            slots[i] = slot
        lacking = keys.some(missing)
        use = Use(batch, integers(slots), integers(missing), lacking.keys, lacking.offsets)
        return Admission(use, Assignment(integers(free + clean + leaving), self._records(leaving)))

    def _victims(self, first_in_flight: int) -> list[int]:
        residents = self.residents().items()
        slots = [slot for slot, held in residents if held.last_use < first_in_flight and held.num_claims == 0]
        return sorted(slots, key=lambda slot: (self.resident(slot).last_use, self.resident(slot).number_of_use))

    def _records(self, slots: list[int]) -> SlotRecords:
        keys = by_table([self.resident(slot).key for slot in slots], self.num_tables)
        steps = integers([self.resident(slot).step for slot in slots])
        return SlotRecords(integers(slots), keys.keys, steps, keys.offsets)

    def evict(self, slots: list[int]) -> None:
        for slot in slots:
            assert self.resident(slot).is_leaving
            self.slots[slot] = TAKEN

    def fill(self, keys: Keys, slots: list[int], is_stored: list[bool], batch: int) -> None:
        for pair, slot, stored in zip(keys.pairs, slots, is_stored, strict=True):
            assert self.slots[slot] == TAKEN
            self.slots[slot] = Resident(pair, stored, batch, self._number())

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            assert self.slots[slot] == TAKEN
            self.slots[slot] = None

    def claim(self, slots: list[int]) -> Tensor:
        for slot in slots:
            held = self.resident(slot)
            held.num_claims += not held.exists
        counts = [0] * self.num_tables
        for held in self.residents().values():
            counts[held.key[0]] += held.num_claims > 0 or (held.is_dirty and not held.is_stored)
        return integers(counts)

    def settle(self, slots: list[int], step: int | None) -> None:
        for slot in slots:
            held = self.resident(slot)
            if step is None:
                held.num_claims = max(held.num_claims - 1, 0)
            else:
                held.num_claims, held.is_dirty, held.step = 0, True, step

    def dirty(self) -> SlotRecords:
        slots = [slot for slot, held in self.residents().items() if held.is_dirty]
        return self._records(sorted(slots, key=lambda slot: (self.resident(slot).key[0], slot)))

    def clean(self, slots: list[int]) -> None:
        for slot in slots:
            held = self.resident(slot)
            held.is_dirty, held.is_stored = False, True

    def clear(self) -> None:
        self.slots = [None] * len(self.slots)
