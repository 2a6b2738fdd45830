"""Writes the rows of one rank to shards, as they were at one moment, while training goes on.

Two threads append to the shards. The thread that saves takes the rows from the store, a stretch at a time. The thread
that writes rows back to the store, during training, first keeps aside what the save has not reached. When 64 MB are
aside, it appends them itself, and training waits for that.
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from nestpipe.checkpoint.shards import ShardContent, ShardFile
from nestpipe.store import NUM_BUCKETS, Piece, Shards, Store, group_by_owner

STRETCH_BYTES = 16 << 20
"""Rows that are taken from the store at a time. Writers wait while they are copied."""
ASIDE_BYTES = 64 << 20
"""Rows aside at which training waits until they are appended."""
SHARD_BYTES = 32 << 20
"""Size of a shard, as long as MOST_SHARDS suffice."""
FEWEST_SHARDS, MOST_SHARDS = 4, 256
"""Shards of a rank. A rank of another world reads only those that have rows of its own."""


def shards_of(rank: int, world_size: int, num_bytes: int) -> Shards:
    """Returns the shards of a rank whose rows have this size."""
    wanted = min(max(num_bytes // SHARD_BYTES, FEWEST_SHARDS), MOST_SHARDS, NUM_BUCKETS // world_size)
    return Shards(wanted * world_size, wanted * rank, wanted)


def buckets_of(shard: int, num_in_world: int) -> range:
    """Returns the buckets of a shard: those with bucket * num_in_world // 65536 == shard."""
    return range(-(-shard * NUM_BUCKETS // num_in_world), -(-(shard + 1) * NUM_BUCKETS // num_in_world))


class RowWriter:
    """The rows of a store at the moment this is made. `write` brings them to disk; another thread may call it."""

    def __init__(
        self,
        store: Store,
        tables: Sequence[str],
        folder: Path,
        rank: int,
        world_size: int,
        save_id: bytes,
        changed_only: bool,
    ) -> None:
        self._numbers = {table: number for number, table in enumerate(tables)}
        self._folder, self._rank, self._save_id = folder, rank, save_id
        self._files: list[ShardFile] = []
        self._file_lock = Lock()
        self._aside: list[tuple[str, Piece]] = []
        self._num_aside_bytes = 0
        self._aside_lock = Lock()
        self._error: OSError | None = None
        self.num_waits = 0
        """Times that training has waited until rows that were aside had been appended."""
        self._snapshot = store.begin_snapshot(changed_only, self._keep_aside)
        self.num_rows = sum(self._snapshot.num_rows.values())
        record_bytes = {table: store.spec(table).record_bytes + 16 for table in tables}
        num_bytes = sum(count * record_bytes[table] for table, count in self._snapshot.num_rows.items())
        self._shards = shards_of(rank, world_size, num_bytes)
        try:
            self._open_files()
        except BaseException:
            self.end()
            raise

    def write(self) -> dict[str, tuple[range, ShardContent]]:
        """Writes all shards, and returns the buckets and the content of each by its file's name."""
        try:
            for table in self._numbers:
                self._append_erased(table, self._snapshot.erased[table])
                for piece, counts in self._snapshot.pieces(table, self._shards, STRETCH_BYTES):
                    with self._file_lock:
                        self._append(table, piece, counts)
                    self._append_aside()
            self._append_aside()
            if self._error is not None:
                raise self._error
            return {file.path.name: (self._buckets(s), file.finish()) for s, file in enumerate(self._files)}
        finally:
            self.end()

    def end(self) -> None:
        """Ends the snapshot and closes the files. A save that is given up leaves them as they are."""
        self._snapshot.end()
        with self._file_lock:
            for file in self._files:
                file.close()

    def _open_files(self) -> None:
        for s in range(self._shards.num_own):
            path = self._folder / f"rank{self._rank:05d}-shard{s:03d}.rows"
            self._files.append(ShardFile(path, self._buckets(s), self._save_id))

    def _buckets(self, own_shard: int) -> range:
        return buckets_of(self._shards.first + own_shard, self._shards.num_in_world)

    def _append_erased(self, table: str, keys: Tensor) -> None:
        order, counts = self._by_shard(table, keys)
        with self._file_lock:
            for file, part in zip(self._files, keys[order].split(counts), strict=True):
                file.append_erased(self._numbers[table], part)

    def _append(self, table: str, piece: Piece, counts: Tensor) -> None:
        """Appends rows in order of their shards."""
        first = 0
        for file, count in zip(self._files, counts.tolist(), strict=True):
            rows = slice(first, first + count)
            file.append_rows(self._numbers[table], Piece(piece.keys[rows], piece.records[rows], piece.steps[rows]))
            first += count

    def _by_shard(self, table: str, keys: Tensor) -> tuple[Tensor, list[int]]:
        order, counts = group_by_owner(table, keys, self._shards.num_in_world)
        return order, counts[self._shards.first :][: self._shards.num_own].tolist()

    def _keep_aside(self, table: str, piece: Piece) -> None:
        """Called by the thread that writes rows back. An error belongs to the save, not to training."""
        with self._aside_lock:
            self._aside.append((table, piece))
            self._num_aside_bytes += sum(array.nbytes for array in piece)
            is_full = self._num_aside_bytes >= ASIDE_BYTES
        if is_full:
            self.num_waits += 1
            self._append_aside()

    def _append_aside(self) -> None:
        with self._file_lock:
            with self._aside_lock:
                aside, self._aside, self._num_aside_bytes = self._aside, [], 0
            while aside and self._error is None:
                table, piece = aside.pop()
                order, counts = self._by_shard(table, piece.keys)
                try:
                    self._append(table, Piece(*(array[order] for array in piece)), torch.tensor(counts))
                except OSError as error:
                    self._error = error
