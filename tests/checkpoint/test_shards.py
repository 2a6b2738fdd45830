"""Shards: what is read is what was written, or an error says that the file is damaged.

Fails, for example, if ShardReader._read_block does not compare the checksum, if ShardFile.append_erased counts nothing,
or if RowReader.read leaves out a shard that has only some rows of its rank.
"""

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

from nestpipe.checkpoint.errors import DamagedError
from nestpipe.checkpoint.partial import whole_columns
from nestpipe.checkpoint.row_reader import RowReader, SavedShard
from nestpipe.checkpoint.row_writer import RowWriter
from nestpipe.checkpoint.shards import ShardFile
from nestpipe.store import HostStore, Piece, Shards, Store, TableSpec, group_by_owner
from tests.checkpoint.saved import HEADER_BYTES, headers_of
from tests.streams import key_streams

SPECS = [
    TableSpec("item", 3, 1, (0.5,), dtype=torch.float64),
    TableSpec("tag", 5),
    TableSpec("never written", 2),
]
ID, OTHER_ID = b"0123456789abcdef", b"another save's i"


def make_store() -> Store:
    store = HostStore()
    for spec in SPECS:
        store.create_table(spec)
    return store


def fill(store: Store, keys: torch.Tensor, rank: int = 0, size: int = 1, tables: list[TableSpec] = SPECS[:2]) -> None:
    """Writes the keys of one rank, with records that depend on them."""
    for spec in tables:
        order, counts = group_by_owner(spec.name, keys, size)
        own = keys[order.split(counts.tolist())[rank]]
        records = torch.randn(len(own), spec.num_columns, dtype=spec.dtype)
        store.scatter(spec.name, own, records, step=len(own))


def write(
    store: Store, folder: Path, rank: int = 0, size: int = 1, changed_only: bool = False, save_id: bytes = ID
) -> list[SavedShard]:
    folder.mkdir(exist_ok=True)
    names = [spec.name for spec in SPECS]
    files = RowWriter(store, names, folder, rank, size, save_id, changed_only).write(Event())
    return [
        SavedShard(folder / name, buckets, save_id, content.num_bytes, content.rows)
        for name, (buckets, content) in files.items()
    ]


def read(*saves: list[SavedShard], rank: int = 0, size: int = 1) -> tuple[Store, int]:
    """Returns a store with the rows of saves, the complete one first, and the number of bytes read."""
    store = make_store()
    names = [spec.name for spec in SPECS]
    reader = RowReader(store, whole_columns(names, {name: store.spec(name) for name in names}), rank, size)
    for shards in saves:
        reader.read(shards)
    return store, reader.num_bytes


def content(*stores: Store) -> dict[str, dict[int, tuple[list[float], int]]]:
    """Returns record and step by key, for each table. No key may be in two stores."""
    rows: dict[str, dict[int, tuple[list[float], int]]] = {}
    for spec in SPECS:
        rows[spec.name] = {}
        for store in stores:
            keys, records, steps = (array.tolist() for array in store.export_piece(spec.name, 0, 65536))
            for key, record, step in zip(keys, records, steps, strict=True):
                assert key not in rows[spec.name]
                rows[spec.name][key] = (record, step)
    return rows


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 1), (3, 2), (4, 3)], ids=str)
def test_round_trip(sizes: tuple[int, int], tmp_path: Path) -> None:
    """Adversarial keys, saved by some ranks and loaded by others: first all rows, then what has changed and was erased
    since. The rows of all ranks together are those that were saved, and each rank reads about its share."""
    num_saved, size = sizes
    streams = [torch.cat(batches).unique() for batches in key_streams().values()]
    keys = torch.cat(streams).unique()
    stores = [make_store() for _ in range(num_saved)]
    for rank, store in enumerate(stores):
        fill(store, keys, rank, num_saved)
    saves = [[s for r, store in enumerate(stores) for s in write(store, tmp_path / "a", r, num_saved)]]
    for rank, store in enumerate(stores):
        store.erase("item", keys[::3].contiguous())
        fill(store, keys[::6].contiguous(), rank, num_saved)
        fill(store, torch.arange(10**6, 10**6 + 50), rank, num_saved, SPECS[:1])
    saves.append([s for r, store in enumerate(stores) for s in write(store, tmp_path / "b", r, num_saved, True)])
    loaded = [read(*saves, rank=rank, size=size) for rank in range(size)]
    assert content(*(store for store, _ in loaded)) == content(*stores)
    total = sum(shard.num_bytes for shards in saves for shard in shards)
    assert max(num_bytes for _, num_bytes in loaded) <= total * (1 / size + 1 / 4 / num_saved) + 2000


def test_more_shards_for_more_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if _reserve or _append takes the number of another rank's shards."""
    monkeypatch.setattr("nestpipe.checkpoint.row_writer.SHARD_BYTES", 700)
    stores = [make_store() for _ in range(2)]
    for rank, store in enumerate(stores):
        fill(store, torch.arange(rank, 100 + 900 * rank), rank, 2)
    saves = [write(store, tmp_path / "a", rank, 2) for rank, store in enumerate(stores)]
    assert 4 < len(saves[0]) < len(saves[1])
    assert {shard.path.name for shard in saves[0]} & {shard.path.name for shard in saves[1]} == set()
    assert content(*(read(saves[0] + saves[1], rank=rank, size=3)[0] for rank in range(3))) == content(*stores)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Store, SavedShard]:
    """A shard of a few rows of two tables and a few erased keys, and what it gives."""
    file = ShardFile(tmp_path / "small.rows", range(65536), ID)
    generator = torch.Generator().manual_seed(0)
    for table, spec in enumerate(SPECS[:2]):
        keys = torch.tensor([5, -1, 2**62])
        file.append_erased(table, keys[:1])
        records = torch.randn(3, spec.num_columns, generator=generator, dtype=spec.dtype)
        file.append_rows(table, Piece(keys, records, torch.arange(3)))
    file.append_rows(2, Piece(torch.tensor([1]), torch.zeros(1, 2), torch.tensor([7])))
    finished = file.finish()
    shard = SavedShard(file.path, range(65536), ID, finished.num_bytes, finished.rows)
    return read([shard])[0], shard


def test_blocks_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as they are rows of one table and small. Fails if _Joined.has_room_for does not compare the table, the
    kind or the number of rows."""
    file = ShardFile(tmp_path / "a.rows", range(65536), ID)
    keys = torch.arange(60)
    for table, first, count in ((0, 0, 3), (0, 3, 1), (1, 4, 2), (0, 6, 2), (0, 8, 50), (0, 58, 2)):
        records = keys[first : first + count, None].float().expand(count, 2).contiguous()
        file.append_rows(table, Piece(keys[first : first + count], records, keys[first : first + count]))
    file.append_erased(0, keys[:2])
    file.append_erased(0, keys[2:5])
    finished = file.finish()
    shard = SavedShard(file.path, range(65536), ID, finished.num_bytes, finished.rows)
    blocks: dict[int, list[tuple[int, list[int]]]] = {}
    for size in (1, 24 * 8, 1 << 20):
        monkeypatch.setattr("nestpipe.checkpoint.shards._JOINED_BYTES", size)
        blocks[size] = []
        for table, piece, erased in shard.blocks():
            own = erased if piece is None else piece.keys
            assert own is not None
            blocks[size].append((table, own.tolist()))
            if piece is not None:
                assert piece.steps.equal(piece.keys)
                assert piece.records.view(torch.float32)[:, 1].equal(piece.keys.float())
    assert [len(own) for _, own in blocks[1]] == [3, 1, 2, 2, 50, 2, 2, 3]
    assert [len(own) for _, own in blocks[24 * 8]] == [4, 2, 2, 50, 2, 5]
    assert [(table, len(own)) for table, own in blocks[1 << 20]] == [(0, 4), (1, 2), (0, 54), (0, 5)]
    assert len({tuple(key for _, own in parts for key in own) for parts in blocks.values()}) == 1


def is_refused(shard: SavedShard) -> bool:
    """Returns whether reading raises DamagedError with the file's name. Any other error ends the test."""
    try:
        for _ in shard.blocks():
            pass
    except DamagedError as error:
        return str(shard.path) in str(error)
    return False


def test_every_byte_counts(small: tuple[Store, SavedShard]) -> None:
    """Fails if a header or a block has no checksum."""
    _, shard = small
    accepted = []
    for place in range(shard.num_bytes):
        data = shard.path.read_bytes()
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        shard.path.write_bytes(flipped)
        accepted += [] if is_refused(shard) else [place]
        shard.path.write_bytes(data)
    assert accepted == []
    assert not is_refused(shard)


def test_cut_at_every_length(small: tuple[Store, SavedShard]) -> None:
    """Even if the manifest says that it is so short, and with bytes behind the end. Fails if ShardReader does not look
    for the end."""
    _, shard = small
    data = shard.path.read_bytes()
    for length in [*range(len(data)), len(data) + 1, len(data) + HEADER_BYTES]:
        shard.path.write_bytes(data.ljust(length, b"\0")[:length])
        assert is_refused(shard)
        assert is_refused(replace(shard, num_bytes=length))
    shard.path.unlink()
    assert is_refused(shard)
    shard.path.mkdir()
    assert is_refused(shard)


def swapped_blocks(a: Path, b: Path) -> Iterator[None]:
    """Swaps blocks of the same length: of two shards, or of one. Undoes it when it is asked for the next."""
    before = {path: path.read_bytes() for path in (a, b)}
    for first in range(1, len(headers_of(a)) - 1):
        for second in range(1, len(headers_of(b)) - 1):
            one, other = ((headers_of(p)[i], headers_of(p)[i + 1]) for p, i in ((a, first), (b, second)))
            if one[1] - one[0] != other[1] - other[0] or (a == b and first >= second):
                continue
            data = {path: bytearray(before[path]) for path in (a, b)}
            data[a][slice(*one)] = before[b][slice(*other)]
            data[b][slice(*other)] = before[a][slice(*one)]
            for path in (a, b):
                path.write_bytes(data[path])
            yield
            for path in (a, b):
                path.write_bytes(before[path])


def even_store() -> Store:
    """Two rows of each table in each of four shards, so that their blocks have the same lengths."""
    store, taken = make_store(), dict[tuple[str, int], int]()
    for spec in SPECS[:2]:
        for key in range(200):
            shard = int(group_by_owner(spec.name, torch.tensor([key]), 4)[1].argmax())
            if taken.setdefault((spec.name, shard), 0) < 2:
                taken[spec.name, shard] += 1
                store.scatter(spec.name, torch.tensor([key]), torch.ones(1, spec.num_columns, dtype=spec.dtype), key)
    return store


@pytest.mark.parametrize("size", [1, 3])
def test_blocks_and_shards_in_other_places(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and files that are good, but not there: another shard's, another save's, in another order. A rank of
    another world, which takes some of a shard's rows, must not leave out others in silence.

    Fails if block headers' checksums do not continue that of the file, or if ShardReader does not compare the buckets,
    the number of a block, or the save's id.
    """
    monkeypatch.setattr("nestpipe.checkpoint.row_writer.STRETCH_BYTES", 1)  # each row is a block
    shards = write(even_store(), tmp_path / "a")
    others = write(even_store(), tmp_path / "b", save_id=OTHER_ID)

    def num_refused() -> int:
        """Returns how many of the ranks refuse what they read."""
        num = 0
        for rank in range(size):
            try:
                read(shards, rank=rank, size=size)
            except DamagedError:
                num += 1
        return num

    assert num_refused() == 0
    num_swaps = 0
    for a, b in [(0, 1), (0, 0), (2, 3)]:
        for _ in swapped_blocks(shards[a].path, shards[b].path):
            num_swaps += 1
            assert num_refused() > 0
    for _ in swapped_blocks(shards[0].path, others[0].path):
        num_swaps += 1
        assert num_refused() > 0
    assert num_swaps == 8 + 2 + 8 + 8
    assert num_refused() == 0
    names = [(shards[0].path, shards[1].path), (shards[0].path, others[0].path)]
    for one, other in names:
        data = one.read_bytes(), other.read_bytes()
        assert len(data[0]) == len(data[1])
        for path, new in ((one, data[1]), (other, data[0])):
            path.write_bytes(new)
        assert num_refused() > 0
        for path, old in ((one, data[0]), (other, data[1])):
            path.write_bytes(old)
    assert num_refused() == 0


def test_tables_that_are_not_there(small: tuple[Store, SavedShard], tmp_path: Path) -> None:
    """A shard with good checksums that a later version, or a defect, has written."""
    _, shard = small
    file = ShardFile(tmp_path / "other.rows", range(65536), ID)
    file.append_rows(3, Piece(torch.tensor([1]), torch.zeros(1, 2), torch.tensor([7])))
    with pytest.raises(DamagedError, match="has rows of table number 3"):
        read([replace(shard, path=file.path, num_bytes=file.finish().num_bytes)])
    with pytest.raises(FileExistsError):
        ShardFile(tmp_path / "other.rows", range(65536), ID)


def plain_crc32c(data: bytes, before: int = 0) -> int:
    """CRC-32C, bit by bit."""
    rest = before ^ 0xFFFFFFFF
    for byte in data:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return rest ^ 0xFFFFFFFF


def test_the_layout(small: tuple[Store, SavedShard]) -> None:
    """A reader in plain Python, by the description in shards.py, finds the same rows. A shard of this version must be
    readable for ever: another layout needs another VERSION, and a reader of this one. Fails if a field moves."""
    store, shard = small
    data = shard.path.read_bytes()
    *header, seal = struct.unpack_from("<8sIIII16s20xI", data)
    assert header == [b"NESTROWS", 1, HEADER_BYTES, 0, 65536, ID]
    assert seal == plain_crc32c(data[:60])
    place, rows = HEADER_BYTES, dict[str, dict[int, tuple[list[float], int]]]({spec.name: {} for spec in SPECS})
    for number in range(6):
        *fields, content_sum, own_sum = struct.unpack_from("<4sIIIQQI24xI", data, place)
        kind, table, record_bytes, block, count, num_bytes = fields
        assert own_sum == plain_crc32c(data[place : place + 60], seal)
        body = data[place + HEADER_BYTES :][:num_bytes]
        assert content_sum == plain_crc32c(body)
        assert block == number
        place += HEADER_BYTES + num_bytes
        if kind != b"ROWS":
            assert (kind, num_bytes) == ((b"GONE", 8 * count) if number < 5 else (b"END ", 0))
            continue
        keys, steps = struct.unpack_from(f"<{count}q", body), struct.unpack_from(f"<{count}q", body, 8 * count)
        letter = "d" if SPECS[table].dtype == torch.float64 else "f"
        for i in range(count):
            record = struct.unpack_from(f"<{SPECS[table].num_columns}{letter}", body, 16 * count + i * record_bytes)
            rows[SPECS[table].name][keys[i]] = (list(record), steps[i])
    assert place == len(data)
    assert count == 3 + 3 + 1 + 2  # the end has the number of all rows and erased keys
    assert rows == content(store)


def test_shards_of_a_rank() -> None:
    """Few rows have few shards, many have as many as may be open. A world may have more ranks than buckets allow."""
    from nestpipe.checkpoint.row_writer import buckets_of, shards_of

    assert shards_of(0, 1, 0) == Shards(4, 0, 4)
    assert shards_of(2, 3, 10 << 40) == Shards(768, 512, 256)
    assert shards_of(5, 60_000, 10 << 40) == Shards(60_000, 5, 1)
    for num_in_world in (4, 768, 60_000):
        buckets = [buckets_of(shard, num_in_world) for shard in range(num_in_world)]
        assert [bucket for part in buckets for bucket in part] == list(range(65536))
        assert all(bucket * num_in_world // 65536 == shard for shard, part in enumerate(buckets) for bucket in part)
