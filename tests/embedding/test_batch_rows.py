"""Rows of one batch at a time, in host memory and as on a device: the store gets back what was trained.

Fails, for example, if offsets_within counts from the group's first key instead of the stretch's, if _Incoming.gather
uses the memory of a stretch before the device is done with it, or if BatchRows writes frozen rows.
"""

from collections.abc import Iterator

import pytest
import torch

from nestpipe.embedding import host_link
from nestpipe.embedding.batch_rows import BatchRows
from nestpipe.embedding.device_memory import DeviceMemory
from nestpipe.embedding.host_memory import HostMemory
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.optim import SGD, Adagrad, RowOptimizer
from nestpipe.embedding.resident import ResidentBatch
from nestpipe.store import HostStore
from tests.embedding.owned import NAMES, by_table, group_of, some_keys, store_of

SHAPES = [
    (7, SGD(0.1), torch.float32, 8),
    (8, SGD(0.1), torch.float32, 8),
    (5, Adagrad(0.1), torch.float32, 12),
    (5, Adagrad(0.1), torch.float64, 10),
    (1, SGD(0.1), torch.float64, 2),
]


@pytest.fixture(params=["host", "one stretch", "many"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    if request.param == "host":
        yield HostMemory()
        return
    monkeypatch.setattr(host_link, "STRETCH_BYTES", 1 << 20 if request.param == "one stretch" else 300)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN
    yield DeviceMemory(torch.device("cpu"), is_staged=False)
    torch.use_deterministic_algorithms(was_deterministic)


@pytest.mark.parametrize(("dim", "optimizer", "dtype", "width"), SHAPES)
def test_round_trip(dim: int, optimizer: RowOptimizer, dtype: torch.dtype, width: int, memory: Memory) -> None:
    """Two batches of three tables share keys."""
    torch.manual_seed(1)
    group = group_of(dim, optimizer, dtype)
    store, expected = store_of(group), store_of(group)
    rows = BatchRows(store, memory)
    for step, sizes in ((2, [40, 0, 13]), (3, [45, 7, 30])):
        dedup = some_keys(group, sizes)
        batch = rows.retrieve([dedup])
        check(batch, expected, memory, width)
        assert rows.num_unstored_keys == sum(
            int((~expected.find(name, keys)).sum()) for name, keys, _ in by_table(dedup)
        )
        batch.groups[0].records[:, : group.num_columns] += 1
        rows.settle(batch, step)
        for name, keys, _ in by_table(dedup):
            expected.scatter(name, keys, expected.gather(name, keys).records + 1, step)
        for name in NAMES:
            assert store.digest_part(name) == expected.digest_part(name)
            steps = store.gather(name, torch.arange(60), with_steps=True).steps
            assert torch.equal(steps, expected.gather(name, torch.arange(60), with_steps=True).steps)


def check(batch: ResidentBatch, expected: HostStore, memory: Memory, width: int) -> None:
    (rows,) = batch.groups
    assert rows.slots is None
    assert rows.records.shape == (len(rows.keys), rows.group.num_columns if memory.is_host else width)
    for name, keys, places in by_table(rows):
        assert torch.equal(rows.copied(memory)[places], expected.gather(name, keys).records)


def test_a_batch_that_was_not_applied_leaves_no_trace() -> None:
    group = group_of(3, SGD(0.1))
    store, expected = store_of(group), store_of(group)
    rows = BatchRows(store, HostMemory())
    batch = rows.retrieve([some_keys(group, [20, 20, 20])])
    batch.groups[0].records += 1
    rows.settle(batch, None)
    rows.flush()
    assert [store.digest_part(name) for name in NAMES] == [expected.digest_part(name) for name in NAMES]


def test_frozen_rows_are_not_written() -> None:
    group = group_of(3, SGD(0.1), frozen=True)
    store, expected = store_of(group), store_of(group)
    rows = BatchRows(store, HostMemory())
    rows.settle(rows.retrieve([some_keys(group, [20, 20, 20])]), 1)
    assert [store.size(name) for name in NAMES] == [expected.size(name) for name in NAMES]


def test_memory_is_reused() -> None:
    """Fails if BatchRows makes a new array for each batch."""
    group = group_of(4, SGD(0.1))
    rows = BatchRows(store_of(group), HostMemory())
    arrays = [
        rows.retrieve([some_keys(group, sizes)]).groups[0].records for sizes in ([9, 9, 0], [1, 0, 0], [30, 9, 9])
    ]
    assert len({array.data_ptr() for array in arrays}) == 1
    assert [len(array) for array in arrays] == [18, 1, 48]
