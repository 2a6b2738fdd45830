"""Resident rows with a mirror, as on a device, in host memory: the store gets back the same rows as without.

Fails, for example, if ResidentRows.state extends to the end of `records`, if _stretches yields None for a stretch with
gaps, if DeviceMemory.empty_records does not set the padding, or if ResidentRows.offsets_of counts from the group's
first slot instead of the stretch's.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from nestpipe.embedding import device_memory
from nestpipe.embedding.device_memory import DeviceMemory
from nestpipe.embedding.group import TableGroup, group_features
from nestpipe.embedding.host_memory import HostMemory
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.optim import SGD, Adagrad, RowOptimizer
from nestpipe.embedding.resident import (
    Overlap,
    RecordMemory,
    ResidentRows,
    find_overlap,
    leaving,
    retrieve_rows,
    sync_overlap,
    write_back,
)
from nestpipe.embedding.route import OwnerDedup
from nestpipe.embedding.table import Pooled, Table
from nestpipe.store import HostStore, init

NUM_KEYS = 60
NAMES = ("item", "tag", "word")


@pytest.fixture(params=[1 << 20, 300], ids=["one stretch", "many"])
def as_on_a_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(device_memory, "STRETCH_BYTES", request.param)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN
    yield DeviceMemory(torch.device("cpu"), is_staged=False)
    torch.use_deterministic_algorithms(was_deterministic)


def group_of(dim: int, optimizer: RowOptimizer, dtype: torch.dtype, names: tuple[str, ...] = NAMES) -> TableGroup:
    tables = [Table(name, dim, init=init.Normal(0.1), optimizer=optimizer, dtype=dtype) for name in names]
    (group,) = group_features({table.name: Pooled(table) for table in tables}).groups
    return group


def store_of(group: TableGroup) -> HostStore:
    """Returns a store in which the even keys of each table have a record."""
    store = HostStore()
    for number, table in enumerate(group.tables):
        store.create_table(table.spec(seed=3))
        keys = torch.arange(0, NUM_KEYS, 2)
        records = torch.arange(len(keys) * group.num_columns, dtype=table.dtype).view(len(keys), -1) + 1000 * number
        store.scatter(table.name, keys, records, step=1)
    return store


def owner_dedup(group: TableGroup, sizes: list[int]) -> OwnerDedup:
    """Returns sizes[t] keys of each table t."""
    keys = torch.cat([torch.randperm(NUM_KEYS)[:size] for size in sizes])
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    none = torch.empty(0, dtype=torch.int64)
    return OwnerDedup(group, keys, offsets, none, torch.empty(0, 1, dtype=torch.uint8), np.zeros(1, dtype=np.int64))


def by_table(keys: OwnerDedup | ResidentRows) -> Iterator[tuple[str, Tensor, slice]]:
    """Yields the name, keys and slots of each table."""
    for number, name in enumerate(keys.group.names):
        slots = slice(*keys.table_offsets[number : number + 2].tolist())
        yield name, keys.keys[slots], slots


def overlap_of(first: OwnerDedup, second: OwnerDedup) -> tuple[Tensor, Tensor]:
    """Returns the slots of the keys that are in both, by comparing all pairs."""
    pairs = []
    for (_, keys, slots), (_, others, other_slots) in zip(by_table(first), by_table(second), strict=True):
        for i, key in enumerate(keys.tolist()):
            pairs += [
                (slots.start + i, other_slots.start + j) for j, other in enumerate(others.tolist()) if key == other
            ]
    pairs.sort(key=lambda pair: pair[1])
    previous_slots, slots = (torch.tensor(column) for column in zip(*pairs, strict=True))
    return previous_slots, slots


SHAPES = [
    (7, SGD(0.1), torch.float32, 8),
    (8, SGD(0.1), torch.float32, 8),
    (5, Adagrad(0.1), torch.float32, 12),
    (5, Adagrad(0.1), torch.float64, 10),
    (1, SGD(0.1), torch.float64, 2),
]


@pytest.mark.parametrize(("dim", "optimizer", "dtype", "width"), SHAPES)
def test_round_trip(dim: int, optimizer: RowOptimizer, dtype: torch.dtype, width: int, as_on_a_device: Memory) -> None:
    """Two batches of three tables share keys; rows pass through mirrors, or through the store alone."""
    torch.manual_seed(1)
    group, memory = group_of(dim, optimizer, dtype), as_on_a_device
    store, expected = store_of(group), store_of(group)
    first, second = owner_dedup(group, [40, 0, 13]), owner_dedup(group, [45, 7, 30])
    previous_slots, slots = overlap_of(first, second)
    (overlap,) = find_overlap([first], [second], memory)
    assert (overlap.previous_slots.tolist(), overlap.slots.tolist()) == (previous_slots.tolist(), slots.tolist())

    (active,) = retrieve_rows([first], store, RecordMemory(memory))
    (prefetched,) = retrieve_rows([second], store, RecordMemory(memory), [overlap])
    check_shape(active, width, expected)
    assert active.is_stored.tolist() == (first.keys % 2 == 0).tolist()
    is_shared = torch.zeros(len(second.keys), dtype=torch.bool).index_fill_(0, slots, True)
    assert prefetched.is_stored.tolist() == ((second.keys % 2 == 0) | is_shared).tolist()

    change(active, 1.0)
    sync_overlap([active], [prefetched], [overlap], memory)
    write_back([active], store, 2, memory, leaving([active], [overlap]))
    change(prefetched, 2.0)
    write_back([prefetched], store, 3, memory)

    for dedup, step, added in ((first, 2, 1.0), (second, 3, 2.0)):
        for name, keys, _ in by_table(dedup):
            expected.scatter(name, keys, expected.gather(name, keys).records + added, step)
    for name in NAMES:
        assert store.digest_part(name) == expected.digest_part(name)


def check_shape(active: ResidentRows, width: int, expected: HostStore) -> None:
    num_columns = active.group.num_columns
    assert active.mirror is not None
    assert active.records.shape == active.mirror.shape == (len(active.keys), width)
    assert active.records.is_contiguous()
    assert active.group.record_bytes == expected.spec("item").record_bytes
    for name, keys, slots in by_table(active):
        records = expected.gather(name, keys).records
        assert torch.equal(torch.cat([active.rows[slots], active.state[slots]], 1), records)
    for array in (active.records, active.mirror):
        assert bool((array[:, num_columns:] == 0).all())


def change(resident: ResidentRows, amount: float) -> None:
    resident.rows.add_(amount)
    resident.state.add_(amount)


def test_what_stays_for_the_next_batch_is_not_written() -> None:
    """Fails if `leaving` returns the slots of the overlap."""
    torch.manual_seed(2)
    group, memory = group_of(3, SGD(0.1), torch.float32), HostMemory()
    store, untouched = store_of(group), store_of(group)
    first, second = owner_dedup(group, [20, 20, 20]), owner_dedup(group, [30, 30, 30])
    overlap = find_overlap([first], [second], memory)
    (active,) = retrieve_rows([first], store, RecordMemory(memory))
    change(active, 1.0)
    write_back([active], store, 2, memory, leaving([active], overlap))
    stays = torch.zeros(60, dtype=torch.bool).index_fill_(0, overlap[0].previous_slots, True)
    assert 0 < int(stays.sum()) < 60
    for name, keys, slots in by_table(first):
        added = store.gather(name, keys).records - untouched.gather(name, keys).records
        assert torch.allclose(added, (~stays[slots]).float()[:, None].expand(-1, 3), atol=1e-3)


def test_memory_is_reserved_once_for_batches_of_a_size() -> None:
    """Fails if RecordMemory.reserve allocates memory for every batch, or too little."""
    group, arrays = group_of(4, SGD(0.1), torch.float32), RecordMemory(HostMemory())
    sizes = [[10, 10, 0], [5, 9, 11], [0, 0, 1], [20, 3, 3]]
    reserved = [arrays.reserve(owner_dedup(group, size)) for size in sizes]
    assert [len(rows.records) for rows in reserved] == [20, 25, 1, 26]
    addresses = [rows.records.data_ptr() for rows in reserved]
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3]


def test_no_padding_in_host_memory() -> None:
    group = group_of(7, SGD(0.1), torch.float32)
    (plain,) = retrieve_rows([owner_dedup(group, [2, 3, 0])], store_of(group), RecordMemory(HostMemory()))
    assert plain.mirror is None
    assert plain.records.shape == (5, 7)


def test_equal_keys_of_two_tables_do_not_overlap() -> None:
    """Fails if match_tables gets all keys of a group as those of one table."""
    group = group_of(2, SGD(0.1), torch.float32, ("item", "tag"))
    none, offsets = torch.empty(0, dtype=torch.int64), (torch.tensor([0, 2, 2]), torch.tensor([0, 1, 3]))
    uses = torch.empty(0, 1, dtype=torch.uint8)
    first, second = (
        OwnerDedup(group, keys, bounds, none, uses, np.zeros(1, dtype=np.int64))
        for keys, bounds in zip((torch.tensor([4, 5]), torch.tensor([5, 4, 5])), offsets, strict=True)
    )
    overlap: list[Overlap] = find_overlap([first], [second], HostMemory())
    assert (overlap[0].previous_slots.tolist(), overlap[0].slots.tolist()) == ([1], [0])
