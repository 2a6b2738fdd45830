"""A Trainer with a store of one's own: any class that has the interface of HostStore.

Fails if Trainer.empty_store, which a load calls, too, ignores new_store.
"""

from pathlib import Path

import pytest
from torch import Tensor

from nestpipe import World
from nestpipe.store import DictStore, HostStore, Store
from tests.clicks import batches, make_trainer


class CountingStore(HostStore):
    """Counts the rows that training reads."""

    num_read = 0

    def gather_tables(self, tables, offsets, keys: Tensor, out, places, found=None) -> Tensor:
        self.num_read += len(keys)
        return super().gather_tables(tables, offsets, keys, out, places, found)


def new_dict_store(num_threads: int) -> Store:
    return DictStore()


@pytest.mark.parametrize(("new_store", "schedule"), [(CountingStore, "nested"), (new_dict_store, "serial")])
def test_same_digest(new_store, schedule: str, tmp_path: Path) -> None:
    usual, own = (make_trainer(World(), schedule=schedule, **o) for o in ({}, {"new_store": new_store}))
    for trainer in (usual, own):
        trainer.fit(batches(World()), 4)
    assert own.digest() == usual.digest()
    kind = type(own.store)
    own.save(tmp_path / "saved")
    own.load(tmp_path / "saved")
    assert type(own.store) is kind
    for trainer in (usual, own):
        trainer.fit(batches(World(), position=4 * 64), 2)
    assert own.digest() == usual.digest()
    if new_store is CountingStore:
        assert own.store.num_read > 0
