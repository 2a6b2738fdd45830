"""Exports a table's rows to plain torch, and imports pretrained rows."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nestpipe.store import group_by_owner, unique
from nestpipe.store.interface import check_keys

if TYPE_CHECKING:
    from nestpipe.embedding.table import Table
    from nestpipe.train.trainer import Trainer


def export_embedding(trainer: "Trainer", name: str) -> tuple[Tensor, nn.Embedding]:
    """Returns the keys of a table, ascending, and an embedding with their rows. All ranks call it and get the same.

    A table with num_keys has the keys 0 .. num_keys - 1, those never trained with their initial rows. Any other table
    has the keys in its stores. The embedding must fit in the memory of each rank.
    """
    table, channel = _table(trainer, name), trainer.world.control
    if table.num_keys is not None:
        all_keys = torch.arange(table.num_keys)
        own_keys = all_keys[_owned_positions(trainer, name, all_keys)]
    else:
        own_keys = trainer.store.export_piece(name, 0, 1 << 16).keys
    if trainer.world.mesh.replica > 0:  # the first sharding group has all rows
        own_keys = own_keys[:0]
    rows = trainer.store.gather(name, own_keys, rows_only=True).records
    keys = torch.cat([part.clone().view(torch.int64) for part in channel.all_gather_bytes(own_keys.view(torch.uint8))])
    parts = channel.all_gather_bytes(rows.flatten().view(torch.uint8))
    all_rows = torch.cat([part.clone().view(table.dtype) for part in parts]).view(-1, table.dim)
    order = keys.argsort()
    return keys[order], nn.Embedding.from_pretrained(all_rows[order], freeze=False)


def import_rows(trainer: "Trainer", name: str, keys: Tensor, rows: Tensor) -> None:
    """Writes pretrained rows with initial row state. All ranks call it with the same rows; each keeps those it owns."""
    table = _table(trainer, name)
    num_keys = check_keys(keys)
    if rows.shape != (num_keys, table.dim) or not rows.is_floating_point():
        raise ValueError(
            f"rows for table {name!r} must be floats of shape [{num_keys}, {table.dim}], one for each key, "
            f"got {rows.dtype} {list(rows.shape)}"
        )
    if len(unique(keys)[0]) < num_keys:
        raise ValueError(f"the keys of the rows for table {name!r} are not distinct")
    if table.num_keys is not None and num_keys and not 0 <= int(keys.min()) <= int(keys.max()) < table.num_keys:
        raise ValueError(f"the keys of the rows for table {name!r} must be 0 .. {table.num_keys - 1}")
    if not bool(rows.isfinite().all()):
        raise ValueError(f"the rows for table {name!r} are not all finite")
    positions = _owned_positions(trainer, name, keys)
    state = torch.tensor(table.spec(trainer.seed).full_initial_state, dtype=table.dtype)
    records = torch.cat([rows[positions].to(table.dtype), state.expand(len(positions), -1)], dim=1)
    with trainer.world.watch.reporting():
        trainer.store.scatter(name, keys[positions], records, step=trainer.num_steps)


def _owned_positions(trainer: "Trainer", name: str, keys: Tensor) -> Tensor:
    """Returns the positions of the keys that this rank owns."""
    mesh = trainer.world.mesh
    order, counts = group_by_owner(name, keys, mesh.num_shards)
    positions: Tensor = order.split(counts.tolist())[mesh.shard]
    return positions


def _table(trainer: "Trainer", name: str) -> "Table":
    for table in trainer.tables:
        if table.name == name:
            return table
    raise ValueError(f"there is no table {name!r}; there are {[table.name for table in trainer.tables]}")
