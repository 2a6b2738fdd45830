"""SlotIndex against a model in plain Python: random batches, some of which fail halfway or are not applied.

Fails, for example, if Slots::append_uses forgets the uses of resident keys (num_used = 0), if Slots::use counts one
twice (`block.num_used += 1 | ...`), if SlotArray::use leaves kLeaving set, or if Slots::settle drops all claims of a
key whose batch was not applied (num_claims = 0).
"""

import copy
import random
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe.store.native.plan_ops import table_salts
from nestpipe.store.native.slot_ops import SlotIndex
from tests.store.native.slot_model import Admission, Keys, SlotModel, admit, by_table, integers

NUM_KEYS = 30
"""Keys of each table that batches draw from."""


def new_index(num_slots: int, num_tables: int = 1, num_threads: int = 1) -> SlotIndex:
    index = SlotIndex(table_salts([f"table {t}" for t in range(num_tables)]), num_threads)
    index.grow(num_slots)
    return index


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, int):
        return bool(a == b)
    return all(same(getattr(a, part.name), getattr(b, part.name)) for part in fields(a))


@dataclass
class Walk:
    """Makes each call on the index and on the model, and compares all that can be seen of them."""

    num_tables: int
    num_threads: int
    seed: int
    batch: int = 1
    in_flight: list[tuple[int, list[int]]] = field(default_factory=list)
    """Batches that are not settled, and their slots."""
    num_refused: int = 0
    num_left: int = 0
    """Dirty victims that were not evicted."""

    def __post_init__(self) -> None:
        self.draws = random.Random(self.seed)
        self.index, self.model = new_index(0, self.num_tables, self.num_threads), SlotModel(self.num_tables)
        self.all_keys = by_table([(t, key) for t in range(self.num_tables) for key in range(NUM_KEYS)], self.num_tables)

    def compare(self) -> None:
        assert torch.equal(self.index.find(*self.all_keys), self.model.find(self.all_keys))
        assert same(self.index.dirty(), self.model.dirty())
        counts = self.index.num_slots, self.index.num_free, self.index.num_resident
        assert counts == (len(self.model.slots), len(self.model.free()), len(self.model.residents()))

    def settle_oldest(self, is_applied: bool) -> None:
        number, slots = self.in_flight.pop(0)
        step = number * 10 if is_applied else None
        self.index.settle(integers(slots), step)
        self.model.settle(slots, step)

    def admit(self, keys: Keys) -> Admission | None:
        """Returns None if there are too few slots."""
        first_in_flight = self.in_flight[0][0] if self.in_flight else self.batch
        try:
            expected = self.model.admit(keys, self.batch, first_in_flight)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                admit(self.index, keys, self.batch, first_in_flight)
            return None
        admission = admit(self.index, keys, self.batch, first_in_flight)
        assert same(admission, expected)
        return admission

    def evict(self, slots: list[int]) -> None:
        self.index.evict(integers(slots))
        self.model.evict(slots)

    def fill(self, keys: Keys, slots: list[int]) -> None:
        is_stored = [self.draws.random() < 0.5 for _ in slots]
        self.index.fill(*keys, integers(slots), torch.tensor(is_stored, dtype=torch.bool), self.batch)
        self.model.fill(keys, slots, is_stored, self.batch)

    def retrieve(self, keys: Keys) -> list[int] | None:
        """Returns the slots of the keys; None if that failed. Whatever belongs to it then is freed."""
        admission = self.admit(keys)
        self.compare()
        if admission is None:
            self.num_refused += 1
            return None
        missing, slots = admission.use.missing.tolist(), admission.slots.tolist()
        leaving, of_missing = admission.assignment.leaving.slots.tolist(), admission.assignment.slots.tolist()
        is_whole = self.draws.random() < 0.7
        num_evicted = len(leaving) if is_whole else self.draws.randint(0, len(leaving))
        self.evict(leaving[:num_evicted])
        num_taken = len(missing) - len(leaving) + num_evicted
        num_filled = len(missing) if is_whole else self.draws.randint(0, num_taken)
        self.fill(keys.some(missing[:num_filled]), of_missing[:num_filled])
        self.index.release(integers(of_missing[num_filled:num_taken]))
        self.model.release(of_missing[num_filled:num_taken])
        self.num_left += len(leaving) - num_evicted
        return slots if is_whole else None

    def train(self) -> None:
        """Trains one batch, with up to two others in flight."""
        while len(self.in_flight) > self.draws.randint(0, 2):
            self.settle_oldest(self.draws.random() < 0.7)
        if self.draws.random() < 0.9:  # else the same batch is tried again
            self.batch += 1
        if self.in_flight and self.in_flight[-1][0] == self.batch:
            self.batch += 1
        keys = by_table(
            [
                (t, key)
                for t in range(self.num_tables)
                for key in self.draws.sample(range(NUM_KEYS), self.draws.randint(0, 8))
            ],
            self.num_tables,
        )
        slots = self.retrieve(keys)
        if slots is not None:
            assert torch.equal(self.index.claim(integers(slots)), self.model.claim(slots))
            self.in_flight.append((self.batch, slots))
        self.compare()

    def flush(self) -> None:
        while self.in_flight:
            self.settle_oldest(True)
        slots = self.index.dirty().slots
        self.index.clean(slots)
        self.model.clean(slots.tolist())
        self.compare()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_tables", [1, 3])
def test_random_walk(num_tables: int, num_threads: int) -> None:
    num_refused = num_left = 0
    for seed in range(3):
        walk = Walk(num_tables, num_threads, seed)
        for step in range(60):
            if step % 12 == 0:
                num_slots = walk.index.num_slots + walk.draws.randint(1, 5 * num_tables)
                walk.index.grow(num_slots)
                walk.model.grow(num_slots)
            walk.train()
            if walk.draws.random() < 0.1:
                walk.flush()
            if step == 40:
                walk.index.clear()
                walk.model.clear()
                walk.in_flight, walk.batch = [], 1
        num_refused, num_left = num_refused + walk.num_refused, num_left + walk.num_left
    assert num_refused > 5
    assert num_left > 5


def test_results_do_not_depend_on_threads() -> None:
    """Lists are long enough for several threads. Fails if Slots::for_each passes i - begin where it should pass i."""
    indices = [new_index(40_000, 2, num_threads) for num_threads in (1, 3)]
    generator = torch.Generator().manual_seed(0)
    for batch in range(1, 7):
        keys = torch.cat([torch.randperm(60_000, generator=generator)[:20_000] for _ in range(2)])
        offsets = torch.tensor([0, 20_000, 40_000])
        keys, offsets = keys[: 40_000 - 4000 * (batch % 2)], offsets - torch.tensor([0, 0, 4000 * (batch % 2)])
        admissions = []
        for index in indices:
            admission = admit(index, Keys(offsets, keys), batch, batch)
            use, slots = admission.use, admission.assignment.slots
            index.evict(admission.assignment.leaving.slots)
            index.fill(use.missing_offsets, use.missing_keys, slots, torch.ones(len(slots)) > 0, batch)
            assert torch.equal(index.find(offsets, keys), admission.slots)
            index.settle(admission.slots[::2].contiguous(), batch)
            admissions.append(admission)
        assert same(*admissions)
        assert same(*(index.dirty() for index in indices))
    assert len(admissions[0].assignment.leaving.slots) > 5000


def test_memory_of_uses_is_bounded() -> None:
    """Batches that find their keys evict nothing. Fails if UseOrder::reserve never compacts."""
    index, keys = new_index(8), torch.arange(5)
    offsets = torch.tensor([0, 5])
    index.fill(offsets, keys, admit(index, Keys(offsets, keys), 1, 1).slots, keys > 0, 1)
    memory_bytes = []
    for batch in range(2, 6002):
        index.use(offsets, keys, batch)
        if batch % 2000 == 1:
            memory_bytes.append(index.memory_bytes())
    assert memory_bytes[0] == memory_bytes[1] == memory_bytes[2] < 200_000
    assert admit(index, Keys(offsets, keys + 100), batch + 1, batch + 1).slots.tolist() == [5, 6, 7, 0, 1]


KEYS, OFFSETS, SLOTS = torch.arange(3), torch.tensor([0, 3]), torch.arange(3)
STORED = SLOTS >= 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: s.grow(4), ValueError, "num_slots is 4, must be 5"),
        (lambda s: s.grow(2**32), ValueError, "num_slots is 4294967296"),
        (lambda s: s.grow(6.0), TypeError, "num_slots must be an integer"),
        (lambda s: s.find(OFFSETS[:1], KEYS), ValueError, "offsets must have shape [2], got [1]"),
        (lambda s: s.find(OFFSETS, KEYS.int()), TypeError, "keys must be torch.int64"),
        (lambda s: s.find(OFFSETS, KEYS[:2]), ValueError, "do not rise from 0 to the number of keys, 2"),
        (lambda s: s.use(OFFSETS, KEYS, 0), ValueError, "batch is 0, must be at least 1"),
        (lambda s: s.use(OFFSETS, KEYS, True), TypeError, "batch must be an integer"),
        (lambda s: admit(s, Keys(OFFSETS, KEYS), 2, 3), ValueError, "first_in_flight is 3, must be 0 .. batch = 2"),
        (
            lambda s: admit(s, Keys(OFFSETS * 2, torch.arange(6)), 1, 1),
            ValueError,
            "need 3 slots, but only 2 are free or may",
        ),
        (lambda s: s.fill(OFFSETS, KEYS, SLOTS[:2], STORED, 2), ValueError, "slots must have shape [3], got [2]"),
        (lambda s: s.fill(OFFSETS, KEYS, SLOTS, KEYS, 2), TypeError, "is_stored must be torch.bool"),
        (lambda s: s.fill(OFFSETS, KEYS + 9, SLOTS, STORED, 2), ValueError, "is 0, a slot that holds a key"),
        (lambda s: s.release(SLOTS + 3), ValueError, "slots[0] is 3, a slot that is free: it belongs to no batch"),
        (lambda s: s.release(SLOTS[:1]), ValueError, "slots[0] is 0, a slot that holds a key"),
        (lambda s: s.evict(SLOTS), ValueError, "slots[0] is 0, a slot that no batch waits for"),
        (lambda s: s.evict(SLOTS.int()), TypeError, "slots must be torch.int64"),
        (lambda s: s.settle(SLOTS + 2, None), ValueError, "slots[1] is 3, a slot that holds no key"),
        (lambda s: s.settle(SLOTS, -1), ValueError, "step is -1"),
        (lambda s: s.settle(SLOTS + 5, None), ValueError, "slots[0] is 5: the pool has 5 slots"),
        (lambda s: s.clean(SLOTS), ValueError, "slots[0] is 0, a slot that is not dirty"),
        (lambda s: copy.copy(s), TypeError, "cannot be copied or pickled"),
        (lambda s: SlotIndex(KEYS, 0), ValueError, "num_threads is 0"),
        (lambda s: SlotIndex(KEYS[:0], 1), ValueError, "num_tables is 0"),
    ],
)
def test_refused(call: Any, error: type[Exception], text: str) -> None:
    index = new_index(5)
    index.fill(OFFSETS, KEYS, admit(index, Keys(OFFSETS, KEYS), 1, 1).slots, STORED, 1)
    with pytest.raises(error) as raised:
        call(index)
    assert text in str(raised.value)
    assert (index.num_slots, index.num_free, index.num_resident) == (5, 2, 3)
    assert index.find(OFFSETS, KEYS).tolist() == [0, 1, 2]
    assert len(index.dirty().slots) == 0
    index.release(admit(index, Keys(OFFSETS, KEYS + 7), 3, 3).slots)
