"""The working set of an owner: the records of its owned keys of one batch, and what happens to them."""

from dataclasses import dataclass

from torch import Tensor

from nestpipe.embedding.route import OwnedTable, Route
from nestpipe.embedding.table import Table
from nestpipe.store import HostStore


@dataclass(frozen=True)
class Buffer:
    """Slot i has the record of the i-th owned key."""

    table: Table
    keys: Tensor
    records: Tensor
    found: Tensor
    """[n] whether the store had the key"""

    @property
    def rows(self) -> Tensor:
        return self.records[:, : self.table.dim]

    @property
    def state(self) -> Tensor:
        return self.records[:, self.table.dim :]


def retrieve_rows(route: Route, store: HostStore) -> list[Buffer]:
    """Host store to buffer. Creates nothing: a missing key has its initial record in the buffer only."""

    def retrieve(owned: OwnedTable) -> Buffer:
        records, found, _ = store.gather(owned.table.name, owned.keys)
        return Buffer(owned.table, owned.keys, records, found)

    return [retrieve(owned) for owned in route.owned]


def room_error(buffers: list[Buffer], store: HostStore) -> ValueError | None:
    """Why these rows cannot all be written back: a table that may not grow that far."""
    for buffer in buffers:
        table = buffer.table
        if table.max_rows is None or table.frozen:
            continue
        needed = store.size(table.name) + len(buffer.found) - int(buffer.found.sum())
        if needed > table.max_rows:
            return ValueError(
                f"table {table.name!r} would have {needed} rows on this rank, more than its max_rows = "
                f"{table.max_rows}; nothing of this step was applied. Raise max_rows, or use more ranks"
            )
    return None


def update_rows(buffers: list[Buffer], gradients: list[Tensor | None], step: int) -> None:
    """The row optimizer, once for each owned key, even where the gradient is zero. `step` counts from 1."""
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if gradient is not None:
            buffer.table.optimizer.apply(buffer.rows, buffer.state, gradient, step)


def write_back(buffers: list[Buffer], store: HostStore, step: int) -> None:
    """Buffer to host store; a key exists from here on."""
    for buffer in buffers:
        if not buffer.table.frozen:
            store.scatter(buffer.table.name, buffer.keys, buffer.records, step)
