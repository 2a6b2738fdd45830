"""Reads the rows of a checkpoint into a store: those that a rank owns, whatever the number of ranks that saved them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestpipe.checkpoint.errors import DamagedError
from nestpipe.checkpoint.shards import Block, ShardReader
from nestpipe.store import NUM_BUCKETS, Piece, Store, group_by_owner

AHEAD = 4
"""Shards' blocks are read by another thread, this many blocks ahead."""


@dataclass(frozen=True)
class SavedShard:
    """A shard as a rank's part of the manifest describes it."""

    path: Path
    buckets: range
    save_id: bytes
    num_bytes: int
    rows: Mapping[int, int]

    def blocks(self) -> Iterator[Block]:
        return ShardReader(self.path, self.buckets, self.save_id, self.num_bytes).blocks()


def saved_shards(checkpoint: Path, parts: Sequence[Mapping[str, Any]], save_id: str) -> list[SavedShard]:
    """Returns the shards that ranks' parts of a manifest name."""
    try:
        return [
            SavedShard(
                checkpoint / name,
                range(*shard["buckets"]),
                bytes.fromhex(save_id),
                shard["bytes"],
                {int(table): count for table, count in shard["rows"].items()},
            )
            for part in parts
            for name, shard in part["shards"].items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{checkpoint}: a rank's part of the manifest is damaged: {error!r}") from None


class RowReader:
    """Imports shards into a store.

    columns: for each table number of the checkpoint the table's name and how to turn saved records into its own; None
    for a table that is left out.
    """

    def __init__(
        self, store: Store, columns: Sequence[tuple[str, Callable[[Tensor], Tensor]] | None], rank: int, world_size: int
    ) -> None:
        self._store = store
        self._columns = columns
        self._rank, self._world_size = rank, world_size
        self._own = range(-(-rank * NUM_BUCKETS // world_size), -(-(rank + 1) * NUM_BUCKETS // world_size))
        self.num_bytes = 0
        """Bytes of the shards that were read."""

    def read(self, shards: Sequence[SavedShard]) -> None:
        """Reads the shards that have rows of this rank. Those of a base must be read before those of later changes."""
        own = [shard for shard in shards if _overlap(shard.buckets, self._own)]
        self._reserve(own)
        for shard, block in _read_ahead(own):
            self._take(shard, block)
        self.num_bytes += sum(shard.num_bytes for shard in own)

    def _reserve(self, shards: Sequence[SavedShard]) -> None:
        """Makes room at once, so that no index grows on the way. A shard may have rows of other ranks."""
        for number, column in enumerate(self._columns):
            if column is not None:
                shares = (s.rows.get(number, 0) * len(_overlap(s.buckets, self._own)) // len(s.buckets) for s in shards)
                spec = self._store.spec(column[0])
                num_rows = max(sum(shares), self._store.size(column[0]))
                self._store.reserve(column[0], min(num_rows, spec.max_rows or num_rows))

    def _take(self, shard: SavedShard, block: Block) -> None:
        if not 0 <= block.table < len(self._columns):
            raise DamagedError(f"{shard.path} has rows of table number {block.table}, which the manifest does not have")
        column = self._columns[block.table]
        if column is None:
            return
        table, convert = column
        if block.erased is not None:
            self._store.erase(table, block.erased)  # keys of other ranks are not there
            return
        assert block.piece is not None
        keys, records, steps = block.piece
        if len(_overlap(shard.buckets, self._own)) < len(shard.buckets):
            order, counts = group_by_owner(table, keys, self._world_size)
            own = order.split(counts.tolist())[self._rank]
            keys, records, steps = keys[own], records[own], steps[own]
        if len(keys) > 0:
            buckets = _overlap(shard.buckets, self._own)
            self._store.import_piece(table, buckets.start, buckets.stop, Piece(keys, convert(records), steps))


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))


def _read_soon(shards: Sequence[SavedShard]) -> None:
    """Has the system begin to read files. One that cannot be opened is an error when it is read."""
    for shard in shards:
        with suppress(OSError), shard.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _read_ahead(shards: Sequence[SavedShard]) -> Iterator[tuple[SavedShard, Block]]:
    """Returns the blocks of all shards. Another thread reads and checks them while this one imports."""

    def blocks() -> Iterator[tuple[SavedShard, Block]]:
        for number, shard in enumerate(shards):
            _read_soon(shards[number + 1 : number + 2])
            for block in shard.blocks():
                yield shard, block

    source = blocks()
    with ThreadPoolExecutor(1, "read-rows") as reader, torch.no_grad():
        pending = [reader.submit(next, source, None) for _ in range(AHEAD)]
        while (item := pending.pop(0).result()) is not None:
            pending.append(reader.submit(next, source, None))
            yield item
