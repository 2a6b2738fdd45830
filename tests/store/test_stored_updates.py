"""Updates of stored records against the oracle: a gather, an update of the records, and a scatter of them.

Fails, for example, if update_records of the native library takes the state at the row, if insert_missing leaves out the
initial record, if Writer.update_tables does not count, or if native_for ignores an update that a derived class defines.
Snapshots are in test_snapshot.py.
"""

import pytest
import torch
from torch import Tensor

from nestpipe.embedding.optim import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from nestpipe.store import DictStore, HostStore, Store, TableSpec, init

DIM, NAMES = 9, ["second", "first"]
OPTIMIZERS = [SGD(lambda step: 0.1 / step), Adagrad(0.1), RowWiseAdagrad(0.1, 0.5), Adam(0.01)]


def new_store(kind: type[HostStore] | type[DictStore], optimizer: RowOptimizer, dtype: torch.dtype) -> Store:
    store: Store = kind()
    width = optimizer.state_width(DIM)
    for name in sorted(NAMES):
        spec = TableSpec(name, DIM, width, optimizer.initial_state(DIM), init.Normal(0.5), dtype, max_rows=60)
        store.create_table(spec)
    return store


def update_by_copies(
    store: Store, offsets: Tensor, keys: Tensor, optimizer: RowOptimizer, gradient: Tensor, step: int
) -> None:
    records = torch.empty(len(keys), DIM + optimizer.state_width(DIM), dtype=gradient.dtype)
    store.gather_tables(NAMES, offsets, keys, records, None)
    optimizer.apply(records[:, :DIM], records[:, DIM:], gradient, step)
    store.scatter_tables(NAMES, offsets, keys, records, None, step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_same_as_copies(optimizer: RowOptimizer, dtype: torch.dtype) -> None:
    """Three updates, the last of which is refused because a table would become too large."""
    native, oracle = new_store(HostStore, optimizer, dtype), new_store(DictStore, optimizer, dtype)
    torch.manual_seed(3)
    writer = native.open_writer()
    assert writer.can_update
    for step, num_keys in ((1, 40), (2, 50), (3, 90)):
        lists = [torch.randperm(num_keys)[: num_keys - number] for number in range(len(NAMES))]
        offsets, keys = torch.tensor([0, *map(len, lists)]).cumsum(0), torch.cat(lists)
        gradient, native_form = torch.randn(len(keys), DIM, dtype=dtype), optimizer.native_for(step)
        assert native_form is not None
        if step == 3:
            with pytest.raises(RuntimeError, match="is full"):
                writer.update_tables(NAMES, offsets, keys, native_form, gradient, step)
        else:
            writer.update_tables(NAMES, offsets, keys, native_form, gradient, step)
            update_by_copies(oracle, offsets, keys, optimizer, gradient, step)
        assert native.num_writes == step
        for name in NAMES:
            pieces = native.export_piece(name, 0, 65536), oracle.export_piece(name, 0, 65536)
            assert all(map(torch.equal, *pieces))


def test_own_updates_are_not_done_in_the_store() -> None:
    """A derived class that changes what `apply` does is not replaced by what its base class does."""

    class OwnUpdate(SGD):
        def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:  # type: ignore[override]
            rows.add_(1.0)

    class OwnRate(SGD):
        def learning_rate(self, step: int) -> float:
            return 0.25 * step

    assert OwnUpdate(0.1).native_for(1) is None
    assert SGD(0.1, weight_decay=0.1).native_for(1) is None
    native_form = OwnRate(0.1).native_for(3)
    assert native_form is not None
    assert native_form.lr == 0.75
