"""Buffers with a mirror, as on a device, in host memory: what the store gets back is what a plain buffer gives it.

Fails, for example, if Buffer.state goes to the end of `records`, if _stretches says of a stretch with gaps that none is
left out, or if BufferMemory leaves the padding as it found it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nestpipe.embedding import buffer as of_product
from nestpipe.embedding.buffer import Buffer, BufferMemory, Overlap, leaving, retrieve_rows, sync_overlap, write_back
from nestpipe.embedding.row_optimizer import SGD, Adagrad
from nestpipe.embedding.table import Table
from nestpipe.store import HostStore, init

NUM_KEYS = 60


@dataclass
class Owned:
    table: Table
    keys: Tensor


@dataclass
class OwnedOnly:
    """As much of a route as a buffer needs."""

    owned: list[Owned]


@pytest.fixture(params=[1 << 20, 300], ids=["one stretch", "many"])
def as_on_a_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(of_product, "is_accelerator", lambda device: True)
    monkeypatch.setattr(of_product, "STRETCH_BYTES", request.param)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN
    yield
    torch.use_deterministic_algorithms(was_deterministic)


def store_of(table: Table) -> HostStore:
    store = HostStore()
    store.create_table(table.spec(seed=3))
    keys = torch.arange(0, NUM_KEYS, 2)
    width = store.spec(table.name).num_columns
    records = torch.arange(len(keys) * width, dtype=table.dtype).view(-1, width)
    store.scatter(table.name, keys, records, step=1)
    return store


TABLES = [
    (Table("item", 7, init=init.Normal(0.1), optimizer=SGD(0.1)), 8),
    (Table("item", 8, init=init.Normal(0.1), optimizer=SGD(0.1)), 8),
    (Table("item", 5, init=init.Normal(0.1), optimizer=Adagrad(0.1)), 12),
    (Table("item", 5, init=init.Normal(0.1), optimizer=Adagrad(0.1), dtype=torch.float64), 10),
    (Table("item", 1, init=init.Normal(0.1), optimizer=SGD(0.1), dtype=torch.float64), 2),
]


@pytest.mark.parametrize(("table", "width"), TABLES)
@pytest.mark.usefixtures("as_on_a_device")
def test_there_and_back(table: Table, width: int) -> None:
    """Two batches that share keys, through mirrors and through the store alone."""
    store, expected = store_of(table), store_of(table)
    first, second = torch.randperm(NUM_KEYS)[:40], torch.randperm(NUM_KEYS)[:45]
    shared = [(i, j) for i, key in enumerate(first.tolist()) for j, other in enumerate(second.tolist()) if key == other]
    shared.sort(key=lambda pair: pair[1])
    before, here = (torch.tensor(slots) for slots in zip(*shared, strict=True))
    overlap = [Overlap(before, here, (before, here))]

    (active,) = retrieve_rows(OwnedOnly([Owned(table, first)]), store, BufferMemory())
    (prefetched,) = retrieve_rows(OwnedOnly([Owned(table, second)]), store, BufferMemory(), overlap)
    check_shape(active, width, expected)
    assert active.found.tolist() == (first % 2 == 0).tolist()
    is_shared = torch.zeros(len(second), dtype=torch.bool).index_fill_(0, here, True)
    assert prefetched.found.tolist() == ((second % 2 == 0) | is_shared).tolist()

    change(active, 1.0)
    sync_overlap([active], [prefetched], overlap)
    write_back([active], store, 2, leaving([active], overlap))
    change(prefetched, 2.0)
    write_back([prefetched], store, 3)

    for keys, step, added in ((first, 2, 1.0), (second, 3, 2.0)):
        records = expected.gather("item", keys).records
        expected.scatter("item", keys, records + added, step)
    assert store.digest_part("item") == expected.digest_part("item")


def check_shape(active: Buffer, width: int, expected: HostStore) -> None:
    num_columns = expected.spec("item").num_columns
    assert active.mirror is not None
    assert active.records.shape == active.mirror.shape == (len(active.keys), width)
    assert active.records.is_contiguous()
    assert active.record_bytes == expected.spec("item").record_bytes
    records = expected.gather("item", active.keys).records
    assert torch.equal(torch.cat([active.rows, active.state], 1), records)
    for array in (active.records, active.mirror):
        assert bool((array[:, num_columns:] == 0).all())


def change(of: Buffer, by: float) -> None:
    of.rows.add_(by)
    of.state.add_(by)


def test_no_padding_without_streams() -> None:
    table, _ = TABLES[0]
    (plain,) = retrieve_rows(OwnedOnly([Owned(table, torch.arange(5))]), store_of(table))
    assert plain.mirror is None
    assert plain.records.shape == (5, 7)
