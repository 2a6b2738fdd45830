"""Shards: the files that hold the rows of a checkpoint, each those of one range of buckets.

A shard is a header, blocks, and an end. A block has rows of one table, or keys that were erased from it; blocks of
different tables follow each other in any order. Every part has a CRC-32C, so that a changed byte is found where it is.
Those of the blocks' headers continue that of the shard's header, so that a block is good in its own shard only.
All numbers are little-endian. docs/checkpoints.md describes the layout byte by byte.
"""

import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from nestpipe.checkpoint.errors import DamagedError
from nestpipe.checkpoint.folder import with_file_name
from nestpipe.store import Piece, crc32c

VERSION = 1
_MAGIC = b"NESTROWS"
_FILE = struct.Struct("<8sIIII16s20x")
"""Magic, version, bytes of this header, first bucket, end of the buckets, id of the save. Its checksum follows."""
_BLOCK = struct.Struct("<4sIIIQQI24x")
"""Kind, table, bytes of a record, number of the block, rows, bytes of the content, its checksum. The header's own
checksum follows. The end is a block without content; its rows are those of all blocks."""
_HEADER_BYTES = 64
_ROWS, _ERASED, _END = b"ROWS", b"GONE", b"END "
_SUBMIT_BYTES = 1 << 20
"""Bytes after which a shard asks the system to write, so that the disk does not wait for the end of the save."""
_READ_BYTES = 1 << 20
"""Bytes that are read from a file at a time."""
_JOINED_BYTES = 8 << 20
"""Size up to which a reader returns blocks of the same table as one."""
_MOST_BYTES = 1 << 30
"""Largest content of a block. Blocks are far smaller; a larger number is damage."""


@dataclass
class ShardContent:
    """Size and number of rows of a shard."""

    num_bytes: int = 0
    rows: Counter[int] = field(default_factory=Counter)
    """Rows by table number."""
    erased: Counter[int] = field(default_factory=Counter)
    """Erased keys by table number."""


class ShardFile:
    """A shard that is being written. An OSError names its file."""

    def __init__(self, path: Path, buckets: range, save_id: bytes) -> None:
        self.path = path
        self.content = ShardContent()
        self._num_blocks = 0
        self._num_submitted = 0
        header = _sealed(_FILE.pack(_MAGIC, VERSION, _HEADER_BYTES, buckets.start, buckets.stop, save_id))
        self._seal = _seal_of(header)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise with_file_name(error, path) from None
        self._write([header])

    def append_rows(self, table: int, piece: Piece) -> None:
        if len(piece.keys) > 0:
            self._append(
                _ROWS, table, piece.records.shape[1] * piece.records.itemsize, [piece.keys, piece.steps, piece.records]
            )
            self.content.rows[table] += len(piece.keys)

    def append_erased(self, table: int, keys: Tensor) -> None:
        if len(keys) > 0:
            self._append(_ERASED, table, 0, [keys])
            self.content.erased[table] += len(keys)

    def finish(self) -> ShardContent:
        """Writes the end, and waits until every byte is on disk."""
        total = self.content.rows.total() + self.content.erased.total()
        self._write([_sealed(_BLOCK.pack(_END, 0, 0, self._num_blocks, total, 0, 0), self._seal)])
        try:
            os.fsync(self._file)
        except OSError as error:
            raise with_file_name(error, self.path) from None
        self.close()
        return self.content

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, kind: bytes, table: int, record_bytes: int, arrays: Sequence[Tensor]) -> None:
        checksum, num_bytes = 0, sum(array.nbytes for array in arrays)
        for array in arrays:
            checksum = crc32c(array, checksum)
        header = _BLOCK.pack(kind, table, record_bytes, self._num_blocks, len(arrays[0]), num_bytes, checksum)
        content = [array.reshape(-1).view(torch.uint8).numpy().data for array in arrays]
        self._write([_sealed(header, self._seal), *content])
        self._num_blocks += 1

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        views = [memoryview(part).cast("B") for part in parts]
        try:
            while views:
                num_written = os.writev(self._file, views)
                self.content.num_bytes += num_written
                while views and num_written >= len(views[0]):
                    num_written -= len(views.pop(0))
                if views:
                    views[0] = views[0][num_written:]
            self._submit()
        except OSError as error:
            raise with_file_name(error, self.path) from None

    def _submit(self) -> None:
        """Has the system begin to write what it holds of the file, and forget it then: nobody reads it soon."""
        num_waiting = self.content.num_bytes - self._num_submitted
        if num_waiting >= _SUBMIT_BYTES:
            os.posix_fadvise(self._file, self._num_submitted, num_waiting, os.POSIX_FADV_DONTNEED)
            self._num_submitted = self.content.num_bytes


class Block(NamedTuple):
    """Rows, or erased keys, of one table."""

    table: int
    piece: Piece | None
    """None for erased keys. Records are bytes, [rows, bytes of a record] uint8."""
    erased: Tensor | None


@dataclass(frozen=True)
class _BlockHeader:
    """Header of a block, as it is in the file."""

    kind: bytes
    table: int
    record_bytes: int
    number: int
    num_rows: int
    num_bytes: int
    checksum: int

    @property
    def makes_sense(self) -> bool:
        expected = self.num_rows * (16 + self.record_bytes if self.kind == _ROWS else 8)
        return self.kind in (_ROWS, _ERASED) and self.num_bytes == expected and self.num_bytes <= _MOST_BYTES


class _Joined:
    """Memory for blocks of one table that follow each other. A save writes small ones, which are slow to import."""

    def __init__(self, first: _BlockHeader) -> None:
        self._first = first
        capacity = max(first.num_rows, _JOINED_BYTES // (16 + first.record_bytes))
        self._arrays = [torch.empty(capacity, dtype=torch.int64)]
        if first.kind == _ROWS:
            self._arrays += [
                torch.empty(capacity, dtype=torch.int64),
                torch.empty(capacity, first.record_bytes, dtype=torch.uint8),
            ]
        self._num_rows = 0

    def has_room_for(self, block: _BlockHeader) -> bool:
        first = self._first
        is_same = (block.kind, block.table, block.record_bytes) == (first.kind, first.table, first.record_bytes)
        return is_same and self._num_rows + block.num_rows <= len(self._arrays[0])

    def read(self, file: IO[bytes], num_rows: int) -> int | None:
        """Reads the content of a block. Returns its checksum; None if the file ends before."""
        checksum = 0
        for array in self._arrays:
            part = array[self._num_rows : self._num_rows + num_rows]
            if file.readinto(part.view(torch.uint8).numpy()) != part.nbytes:  # type: ignore[attr-defined]
                return None
            checksum = crc32c(part, checksum)
        self._num_rows += num_rows
        return checksum

    def block(self) -> Block:
        arrays = [array[: self._num_rows] for array in self._arrays]
        if self._first.kind == _ERASED:
            return Block(self._first.table, None, *arrays)
        keys, steps, records = arrays
        return Block(self._first.table, Piece(keys, records, steps), None)


class ShardReader:
    """The blocks of a shard. A file that is not exactly what was written raises DamagedError."""

    def __init__(self, path: Path, buckets: range, save_id: bytes, num_bytes: int) -> None:
        self.path = path
        self._buckets = buckets
        self._save_id = save_id
        self._num_bytes = num_bytes

    def blocks(self) -> Iterator[Block]:
        """Reads and checks the blocks in order. Returns small ones of the same table as one. The end, and with it the
        length of the file, is checked last."""
        try:
            with self.path.open("rb", buffering=_READ_BYTES) as file:
                yield from self._blocks(file)
        except OSError as error:
            raise DamagedError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def _blocks(self, file: IO[bytes]) -> Iterator[Block]:
        size = os.fstat(file.fileno()).st_size
        if size != self._num_bytes:
            raise DamagedError(f"{self.path} has {size} bytes instead of {self._num_bytes}")
        seal = self._check_file_header(file)
        joined: _Joined | None = None
        num_blocks = num_rows = 0
        while True:
            where = f"block {num_blocks}"
            block = _BlockHeader(*_BLOCK.unpack(self._header(file, where, seal)[:-4]))
            if block.number != num_blocks:
                raise DamagedError(f"{self.path}: block {block.number} is in the place of {where}")
            if block.kind == _END:
                break
            if not block.makes_sense:
                raise DamagedError(f"{self.path}: {where} is damaged: its header makes no sense")
            if joined is not None and not joined.has_room_for(block):
                yield joined.block()
                joined = None
            joined = joined or _Joined(block)
            self._read_block(file, joined, block, where)
            num_blocks, num_rows = num_blocks + 1, num_rows + block.num_rows
        if block.num_rows != num_rows or file.tell() != size:
            raise DamagedError(f"{self.path} ends too early")
        if joined is not None:
            yield joined.block()

    def _check_file_header(self, file: IO[bytes]) -> int:
        """Returns the checksum that those of the blocks' headers continue."""
        header = self._header(file, "its header")
        magic, version, header_bytes, *buckets, save_id = _FILE.unpack(header[:-4])
        if magic != _MAGIC or header_bytes != _HEADER_BYTES:
            raise DamagedError(f"{self.path} is not a shard of rows")
        if version != VERSION:
            raise DamagedError(f"{self.path} has version {version} of the format; this program reads {VERSION}")
        if save_id != self._save_id:
            raise DamagedError(f"{self.path} belongs to another save")
        if range(*buckets) != self._buckets:
            raise DamagedError(f"{self.path} is another shard: it has buckets {buckets}")
        return _seal_of(header)

    def _read_block(self, file: IO[bytes], joined: _Joined, block: _BlockHeader, where: str) -> None:
        checksum = joined.read(file, block.num_rows)
        if checksum is None:
            raise DamagedError(f"{self.path}: {where} is cut off")
        if checksum != block.checksum:
            raise DamagedError(f"{self.path}: {where} is damaged: its checksum is wrong")

    def _header(self, file: IO[bytes], where: str, before: int = 0) -> bytes:
        data = file.read(_HEADER_BYTES)
        if len(data) != _HEADER_BYTES or _sealed(data[:-4], before) != data:
            raise DamagedError(f"{self.path}: {where} is damaged: the checksum of its header is wrong")
        return data


def _sealed(header: bytes, before: int = 0) -> bytes:
    """Returns a header with its checksum. before: checksum of what the header belongs to."""
    return header + struct.pack("<I", crc32c(torch.frombuffer(bytearray(header), dtype=torch.uint8), before))


def _seal_of(header: bytes) -> int:
    """Returns the checksum at the end of a header."""
    return int.from_bytes(header[-4:], "little")
