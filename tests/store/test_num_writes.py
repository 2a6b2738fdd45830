"""A store counts the calls that may have changed a row."""

import pytest
import torch

from nestpipe.store import DictStore, HostStore, Piece, Store, TableSpec

KEYS = torch.arange(3)
RECORDS = torch.ones(3, 6)
ITEM = ["item"], torch.tensor([0, 3])

WRITES = {
    "scatter": lambda s: s.scatter("item", KEYS, RECORDS, 1),
    "scatter_tables": lambda s: s.scatter_tables(*ITEM, KEYS, RECORDS, None, KEYS),
    "import_piece": lambda s: s.import_piece("item", 0, 65536, Piece(KEYS, RECORDS, KEYS)),
    "erase": lambda s: s.erase("item", KEYS[:1]),
}


@pytest.mark.parametrize("make", [HostStore, DictStore])
def test_num_writes(make: type[HostStore] | type[DictStore]) -> None:
    """Fails if Writer.scatter_tables does not count, or if begin_write counts before it refuses."""
    store: Store = make()
    store.create_table(TableSpec("item", 4, 2))
    for number, write in enumerate(WRITES.values()):
        assert store.num_writes == number
        write(store)
    for read in (store.size, store.digest_part, lambda name: store.reserve(name, 20)):
        read("item")
    store.gather("item", KEYS)
    store.find("item", KEYS)
    assert store.num_writes == 4
    writer = store.open_writer()
    for write in WRITES.values():
        with pytest.raises(RuntimeError, match="rows are being trained"):
            write(store)
    assert store.num_writes == 4
    writer.scatter_tables(*ITEM, KEYS, 2 * RECORDS, None, KEYS + 7)
    writer.close()
    assert store.num_writes == 5
    gathered = store.gather("item", KEYS, with_steps=True)
    assert gathered.steps is not None
    assert gathered.steps.tolist() == [7, 8, 9]
