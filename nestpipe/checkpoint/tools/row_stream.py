"""Streams the rows of a checkpoint and its bases: the newest record of each key, without the erased ones.

Rows are read by ranges of buckets, and within a range from the newest checkpoint to the oldest. What must be kept of a
newer one are its keys alone: an older row of such a key is left out. So records pass through block by block, whatever
the number of ranks that saved them, and memory is bounded by the keys of a range.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nestpipe.checkpoint.errors import DamagedError
from nestpipe.checkpoint.tools.saved import SavedCheckpoint, Shard
from nestpipe.store import NUM_BUCKETS, hash_keys

NO_KEYS = torch.empty(0, dtype=torch.int64)


class Rows(NamedTuple):
    """Some rows of a table."""

    table: str
    keys: Tensor
    records: Tensor
    """[rows, bytes of a record] uint8."""
    steps: Tensor


def split_buckets(shards: Sequence[Shard], size_of: Callable[[Shard], int], most: int) -> list[range]:
    """Splits all buckets into ranges of at most this size, if a bucket is not larger.

    A range ends where shards end, as far as possible: a shard that lies in several ranges is read for each of them.
    """
    changes = np.zeros(NUM_BUCKETS + 1)  # of the size of a bucket, against the bucket before
    for shard in shards:
        buckets = shard.file.buckets
        changes[buckets.start] += size_of(shard) / len(buckets)
        changes[buckets.stop] -= size_of(shard) / len(buckets)
    size_before = np.concatenate([[0.0], np.cumsum(np.cumsum(changes[:-1]))])
    ends = np.array(sorted({NUM_BUCKETS, *(shard.file.buckets.stop for shard in shards)}))
    ranges, first = [], 0
    while first < NUM_BUCKETS:
        limit = int(np.searchsorted(size_before, size_before[first] + most * (1 + 1e-9), side="right")) - 1
        end = int(ends[np.searchsorted(ends, limit, side="right") - 1]) if limit >= ends[0] else 0
        if end <= first:
            end = min(max(limit, first + 1), NUM_BUCKETS)
        ranges.append(range(first, end))
        first = end
    return ranges


class RowStream:
    """The rows of a checkpoint. chain: the checkpoint behind its bases."""

    def __init__(
        self, chain: Sequence[SavedCheckpoint], after_block: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """after_block: called with the number of bytes read, for example to show progress."""
        self._chain = chain
        self._after_block = after_block

    def rows(self, buckets: range) -> Iterator[Rows]:
        """Returns the rows in a range of buckets, in no particular order. Each key occurs once."""
        newer: dict[str, Tensor] = defaultdict(lambda: NO_KEYS)
        for checkpoint in reversed(self._chain):
            is_complete = checkpoint is self._chain[0]
            own: dict[str, list[Tensor]] = defaultdict(list)
            for table, keys, rows in self._blocks(checkpoint, buckets):
                if not is_complete:
                    own[table].append(keys.clone())  # they are part of their block's memory, which is to be freed
                if rows is not None:
                    yield _without(rows, newer[table])
            # Keys that this checkpoint has erased concern older ones only, whatever their place in the file.
            for table, parts in own.items():
                newer[table] = torch.cat([newer[table], *parts]).sort().values

    def _blocks(self, checkpoint: SavedCheckpoint, buckets: range) -> Iterator[tuple[str, Tensor, Rows | None]]:
        """Returns the blocks of a checkpoint, as far as they are in a range: table, keys, and rows unless they are
        erased keys."""
        names = list(checkpoint.tables)
        for shard in checkpoint.shards:
            inside = range(max(shard.file.buckets.start, buckets.start), min(shard.file.buckets.stop, buckets.stop))
            for block in shard.file.blocks() if inside else ():
                if not 0 <= block.table < len(names):
                    raise DamagedError(
                        f"{shard.file.path} has rows of table number {block.table}, which does not exist"
                    )
                table = names[block.table]
                keys = block.erased if block.piece is None else block.piece.keys
                assert keys is not None
                is_whole = inside == shard.file.buckets
                chosen = torch.ones(len(keys), dtype=torch.bool) if is_whole else is_inside(table, keys, buckets)
                if block.piece is None:
                    yield table, keys[chosen], None
                else:
                    if block.piece.records.shape[1] != checkpoint.tables[table].record_bytes:
                        raise DamagedError(f"{shard.file.path} has records of another size than table {table!r}")
                    rows = select(Rows(table, *block.piece), chosen)
                    yield table, rows.keys, rows
                self._after_block(8 * len(keys) if block.piece is None else sum(array.nbytes for array in block.piece))


def is_inside(table: str, keys: Tensor, buckets: range) -> Tensor:
    """Returns which keys are in a range of buckets."""
    bucket = (hash_keys(table, keys.contiguous()) >> 48) & 0xFFFF
    return (bucket >= buckets.start) & (bucket < buckets.stop)


def find(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, for sorted keys, the places at which wanted ones are, and which of those are there."""
    if len(keys) == 0:
        return NO_KEYS, torch.zeros(len(wanted), dtype=torch.bool)
    # Blocks are small: torch would wake up its threads for each of them.
    places = np.searchsorted(keys.numpy(), wanted.numpy())
    places[places == len(keys)] = 0
    is_found = keys.numpy()[places] == wanted.numpy()
    return torch.from_numpy(places[is_found]), torch.from_numpy(is_found)


def select(rows: Rows, chosen: Tensor) -> Rows:
    """Returns some of the rows. chosen: [rows] bool."""
    if bool(chosen.all()):
        return rows
    index = chosen.nonzero().squeeze(1)  # copies whole records, unlike indexing by a mask
    return Rows(rows.table, *(array.index_select(0, index) for array in rows[1:]))


def _without(rows: Rows, keys: Tensor) -> Rows:
    if len(keys) == 0:
        return rows
    _, is_newer = find(keys, rows.keys)
    return select(rows, ~is_newer)
