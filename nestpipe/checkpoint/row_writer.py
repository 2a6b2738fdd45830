"""Writes the rows of one rank to shards, as they were at one moment, while training goes on.

Two threads append to the shards. The thread that saves takes the rows from the store, a stretch at a time. The thread
that writes rows back to the store, during training, first keeps aside what the save has not reached. When 64 MB are
aside, it appends them itself, and training waits for that.

Training needs the processor, the memory and Python's lock, too. So the save rests after each stretch, as long as that
has taken, until somebody waits for the save.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Lock

import torch
from torch import Tensor

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.shards import ShardContent, ShardFile
from nestpipe.store import NUM_BUCKETS, Piece, Shards, Store, group_by_owner

STRETCH_BYTES = 16 << 20
"""Rows that are taken from the store at a time, with up to SHARDS_A_STRETCH shards. Writers wait while they are
copied."""
SHARDS_A_STRETCH = 128
"""With more shards a stretch is larger: a stretch becomes a block in each of them, which has a cost of its own."""
ASIDE_BYTES = 64 << 20
"""Rows aside at which training waits until they are appended."""
SHARD_BYTES = 128 << 20
"""Size of a shard, as long as MOST_SHARDS suffice."""
LONGEST_PAUSE_SECONDS = 1.0
"""After a stretch for which the disk has stood still, for example."""
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
        self._aside: dict[str, list[Piece]] = {}
        self._num_aside_bytes = 0
        self._aside_lock = Lock()
        self._error: Exception | None = None
        self.num_waits = 0
        """Times that training has waited until rows that were aside had been appended."""
        self._snapshot = store.begin_snapshot(changed_only, self._keep_aside)
        num_rows = {table: self._snapshot.num_rows[table] for table in tables}  # the store may have other tables
        self.num_rows = sum(num_rows.values())
        num_bytes = sum(count * (store.spec(table).record_bytes + 16) for table, count in num_rows.items())
        self._shards = shards_of(rank, world_size, num_bytes)
        try:
            self._open_files()
            for table in tables:  # before any row: a key may have been written again
                self._append_erased(table, self._snapshot.erased[table])
        except BaseException:
            self.end()
            raise

    def write(self, is_awaited: Event) -> dict[str, tuple[range, ShardContent]]:
        """Writes all shards, and returns the buckets and the content of each by its file's name.

        is_awaited: set when somebody waits for the save, which then makes no more pauses.
        """
        stretch_bytes = STRETCH_BYTES * -(-self._shards.num_own // SHARDS_A_STRETCH)
        began = time.monotonic()
        try:
            for table in self._numbers:
                for piece, counts in self._snapshot.pieces(table, self._shards, stretch_bytes):
                    with self._file_lock:
                        self._append(table, piece, counts)
                    self._append_aside()
                    self._raise_error()
                    is_awaited.wait(min(time.monotonic() - began, LONGEST_PAUSE_SECONDS))
                    began = time.monotonic()
            self._append_aside()
            self._raise_error()
            self._check_num_rows()
            return {file.path.name: (self._buckets(s), file.finish()) for s, file in enumerate(self._files)}
        finally:
            self.end()

    def end(self) -> None:
        """Ends the snapshot and closes the files. A save that is given up leaves them as they are."""
        self._snapshot.end()
        with self._file_lock:
            for file in self._files:
                file.close()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_num_rows(self) -> None:
        num_written = sum(file.content.rows.total() for file in self._files)
        if num_written != self.num_rows:
            raise CheckpointError(f"{num_written} rows were written, {self.num_rows} had to be; please report this")

    def _open_files(self) -> None:
        for s in range(self._shards.num_own):
            path = self._folder / f"rank{self._rank:05d}-shard{s:03d}.rows"
            self._files.append(ShardFile(path, self._buckets(s), self._save_id))

    def _buckets(self, own_shard: int) -> range:
        return buckets_of(self._shards.first + own_shard, self._shards.num_in_world)

    def _append_erased(self, table: str, keys: Tensor) -> None:
        for some in keys.split(STRETCH_BYTES // keys.itemsize):
            order, counts = self._by_shard(table, some)
            with self._file_lock:
                for file, part in zip(self._files, some[order].split(counts), strict=True):
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
        if table not in self._numbers:
            return
        with self._aside_lock:
            self._aside.setdefault(table, []).append(piece)
            self._num_aside_bytes += _num_bytes(piece)
            is_full = self._num_aside_bytes >= ASIDE_BYTES
        if is_full:
            self.num_waits += 1
            self._append_aside()

    def _append_aside(self) -> None:
        with self._file_lock:
            with self._aside_lock:
                aside, self._aside, self._num_aside_bytes = self._aside, {}, 0
            try:
                for table, pieces in aside.items():
                    while pieces and self._error is None:
                        piece = _take_stretch(pieces)
                        order, counts = self._by_shard(table, piece.keys)
                        self._append(table, Piece(*(array[order] for array in piece)), torch.tensor(counts))
            except Exception as error:
                self._error = error


def _take_stretch(pieces: list[Piece]) -> Piece:
    """Removes pieces from a list, about STRETCH_BYTES, and returns them as one.

    Training keeps few rows aside at a time. A block for each of these pieces in each shard would take long.
    """
    taken = [pieces.pop()]
    num_bytes = _num_bytes(taken[0])
    while pieces and num_bytes < STRETCH_BYTES:
        taken.append(pieces.pop())
        num_bytes += _num_bytes(taken[-1])
    return Piece(*map(torch.cat, zip(*taken, strict=True)))


def _num_bytes(piece: Piece) -> int:
    return sum(array.nbytes for array in piece)
