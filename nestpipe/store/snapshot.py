"""Snapshots: the rows of a store as they are at one moment, copied while training goes on writing."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from nestpipe.store.interface import Piece

KeepAside = Callable[[str, Piece], None]
"""Called by a thread that is about to write, with a table and rows of a snapshot as they were. It may block."""


class Shards(NamedTuple):
    """Even ranges of buckets: bucket b is in shard b * num_in_world // 65536."""

    num_in_world: int
    first: int
    """First shard of this store."""
    num_own: int
    """Shards of this store, which has no rows of others."""


class ShardedPiece(NamedTuple):
    """Rows in order of their shards."""

    piece: Piece
    counts: Tensor
    """[num_own] int64: rows of each shard."""


class Snapshot(Protocol):
    """The rows of all tables at the moment the snapshot began. Every row is given once: by `pieces`, or, if it is about
    to be written before that, to the KeepAside function."""

    num_rows: dict[str, int]
    """Rows of each table in the snapshot."""
    erased: dict[str, Tensor]
    """Keys of each table that were erased since the snapshot before began; empty in a complete one. Some may have been
    written again: they are among the rows, too."""

    def pieces(self, table: str, shards: Shards, num_bytes: int) -> Iterator[ShardedPiece]:
        """Returns the rows of a table that were not kept aside, about num_bytes at a time. A piece is valid until the
        next one is asked for."""

    def end(self) -> None:
        """Ends the snapshot, complete or not. Ending twice does nothing."""
