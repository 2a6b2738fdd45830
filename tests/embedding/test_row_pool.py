"""The row pool, in host memory and as on a device: whatever its size, the store ends up with what was trained.

Fails, for example, if _Swap.gather counts offsets from the batch's first key, if HostLink.swap puts keys into the
index before their slots are filled, if _SwapStretch.scatter evicts before it writes, if records are written with the
step of the last batch, or if RowPool.open keeps rows after writes of others.
"""

import random
import time
from itertools import pairwise

import pytest
import torch

from nestpipe.embedding import host_link
from nestpipe.embedding.capacity import Capacity
from nestpipe.embedding.device_memory import DeviceMemory
from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.host_memory import HostMemory
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.optim import SGD, Adagrad
from nestpipe.embedding.resident import Growth, ResidentBatch
from nestpipe.embedding.route import OwnerDedup
from nestpipe.embedding.row_pool import RowPool
from nestpipe.store import HostStore
from tests.embedding.owned import NAMES, by_table, group_of, owned_keys, some_keys, store_of

CPU = torch.device("cpu")


def pool_of(group: TableGroup, store: HostStore, memory: Memory, num_slots: int) -> RowPool:
    """Returns a pool with exactly this many slots."""
    row_bytes = memory.new_records(group.num_columns, group.dtype).row_bytes
    pool = RowPool([group], store, memory, Capacity(num_slots * row_bytes, CPU))
    pool.open(store)
    return pool


def admitted(pool: RowPool, previous: OwnerDedup | None, current: OwnerDedup) -> ResidentBatch:
    growth = pool.growth([] if previous is None else [[previous]], [current])
    assert growth.error is None, growth.error
    pool.grow(growth)
    return pool.retrieve([current])


def train(batch: ResidentBatch, expected: HostStore, step: int) -> None:
    """Adds 1 to the records of a batch, in their slots and in the expected store."""
    (rows,) = batch.groups
    assert rows.slots is not None
    rows.records[rows.slots, : rows.group.num_columns] += 1
    for name, keys, _ in by_table(rows):
        expected.scatter(name, keys, expected.gather(name, keys).records + 1, step)


def check(store: HostStore, expected: HostStore) -> None:
    for name in NAMES:
        assert store.digest_part(name) == expected.digest_part(name)
        pieces = [s.export_piece(name, 0, 65536) for s in (store, expected)]
        assert torch.equal(pieces[0].steps, pieces[1].steps)


def in_host_memory(_: pytest.MonkeyPatch) -> Memory:
    return HostMemory()


def as_on_a_device(patch: pytest.MonkeyPatch) -> Memory:
    patch.setattr(host_link, "STRETCH_BYTES", 300)
    return DeviceMemory(CPU, is_staged=False)


@pytest.mark.parametrize("make_memory", [in_host_memory, as_on_a_device])
@pytest.mark.parametrize("num_spare", [0, 1, 30, 500])
def test_many_batches(make_memory, num_spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches are in flight at a time; one in eight is not applied; the store is flushed now and then."""
    torch.manual_seed(num_spare)
    chance = random.Random(num_spare)
    group, memory = group_of(5, Adagrad(0.1)), make_memory(monkeypatch)
    store, expected = store_of(group), store_of(group)
    dedups = [some_keys(group, [chance.randrange(25) for _ in NAMES]) for _ in range(60)]
    pairs = pairwise(dedups)
    most = max(len({(n, k) for d in pair for n, keys, _ in by_table(d) for k in keys.tolist()}) for pair in pairs)
    pool = pool_of(group, store, memory, most + num_spare)
    batch = admitted(pool, None, dedups[0])
    for step in range(1, 60):
        following = admitted(pool, dedups[step - 1], dedups[step])
        is_applied = chance.random() > 0.1
        for name, keys, places in by_table(batch.groups[0]):
            assert torch.equal(batch.groups[0].copied(memory)[places], expected.gather(name, keys).records)
        if is_applied:
            train(batch, expected, step)
        pool.settle(batch, step if is_applied else None)
        if chance.random() < 0.1:
            num_rows = pool.num_rows
            pool.flush()
            check(store, expected)
            assert pool.num_rows == num_rows
        batch = following
    pool.settle(batch, None)
    pool.flush()
    check(store, expected)
    assert pool.num_bytes <= (most + num_spare) * pool._groups[0].records.row_bytes


def test_shared_rows_are_not_copied() -> None:
    """Fails if Index lookups of two tables are mixed up, or if a hit is retrieved again."""
    group = group_of(2, SGD(0.1))
    pool = pool_of(group, store_of(group), HostMemory(), 20)
    first, second = owned_keys(group, [4, 5], [], [5]), owned_keys(group, [9, 5], [5], [5])
    before = admitted(pool, None, first)
    after = admitted(pool, first, second)
    assert (before.num_retrieved_keys, after.num_retrieved_keys, after.num_written_bytes) == (3, 2, 0)
    slots = [batch.groups[0].host_slots.tolist() for batch in (before, after)]
    assert (slots[0][1], slots[0][2]) == (slots[1][1], slots[1][3])
    assert len({*slots[0], *slots[1]}) == 5


def test_only_changed_rows_are_written() -> None:
    """Rows of a batch that was not applied leave without being written, and leave no key."""
    group = group_of(2, SGD(0.1))
    store = store_of(group)
    pool = pool_of(group, store, HostMemory(), 4)
    sizes = [store.size(name) for name in NAMES]
    for number, keys in enumerate(([1, 2], [3, 4], [5, 6], [7, 8])):
        batch = (
            pool.retrieve([owned_keys(group, keys, [], [])])
            if number
            else admitted(pool, None, owned_keys(group, [1, 2, 3, 4], [], []))
        )
        pool.settle(batch, None)
        assert batch.num_written_bytes == 0
    assert [store.size(name) for name in NAMES] == sizes


class RefusedError(Exception):
    pass


@pytest.mark.parametrize("fails_at", ["gather_tables", "scatter_tables", "assign", "fill"])
def test_a_failed_retrieve_loses_nothing(fails_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store or the index fails in the second stretch. Later batches find every row and every slot.

    Fails if GroupPool.retrieve does not release slots, or releases those of victims that were not written, or if
    HostLink.swap does not wait for the other thread before it raises.
    """
    group, memory = group_of(5, Adagrad(0.1)), as_on_a_device(monkeypatch)
    store, expected = store_of(group), store_of(group)
    pool = pool_of(group, store, memory, 40)
    pool.grow(Growth((40,), 0))
    step = 0
    for first in (0, 20):  # the slots of the first batch are clean, and given away first
        batch = admitted(pool, None, owned_keys(group, range(first, first + 20), [], []))
        step += 1
        if first > 0:
            train(batch, expected, step)
        pool.settle(batch, step if first > 0 else None)
    index = pool._groups[0].index
    calls, owner = [], store if fails_at.endswith("tables") else index
    original = getattr(owner, fails_at)

    def fails(*arguments):
        calls.append(0)
        if len(calls) == 2:
            raise RefusedError
        return original(*arguments)

    def slow(*arguments, assign=index.assign):
        time.sleep(0.02)  # another thread does this meanwhile
        return assign(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(index, "assign", slow)
        patch.setattr(owner, fails_at, fails)
        with pytest.raises(RefusedError):
            pool.retrieve([owned_keys(group, [], range(30), [])])
    time.sleep(0.05)  # nothing may go on behind the caller
    assert index.num_free + index.num_resident == 40
    for first in (0, 20):
        batch = pool.retrieve([owned_keys(group, range(first, first + 20), range(20), [])])
        for name, keys, places in by_table(batch.groups[0]):
            assert torch.equal(batch.groups[0].copied(memory)[places], expected.gather(name, keys).records)
        step += 1
        train(batch, expected, step)
        pool.settle(batch, step)
    pool.flush()
    check(store, expected)


def test_writes_of_others_empty_the_pool() -> None:
    """Fails if RowPool.open ignores the store's number of writes, or counts the pool's own as others'."""
    group = group_of(2, SGD(0.1), names=("item",))
    store = store_of(group)
    pool = pool_of(group, store, HostMemory(), 10)
    batch = admitted(pool, None, owned_keys(group, [1, 2]))
    batch.groups[0].records[batch.groups[0].slots] = 5.0
    pool.settle(batch, 1)
    pool.flush()
    pool.open(store)
    assert pool.num_rows == 2
    store.scatter("item", torch.tensor([2]), torch.full((1, 2), 7.0), 2)
    batch = pool.retrieve([owned_keys(group, [1])])
    assert "was written to while a pipeline is open" in str(pool.room_error(batch))
    pool.settle(batch, None)
    pool.open(store)
    assert pool.num_rows == 0
    batch = pool.retrieve([owned_keys(group, [1, 2])])
    assert batch.groups[0].copied(HostMemory()).tolist() == [[5.0, 5.0], [7.0, 7.0]]
    assert pool.room_error(batch) is None
