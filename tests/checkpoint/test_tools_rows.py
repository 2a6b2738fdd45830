"""Rows of a checkpoint and its bases, streamed: the newest record of each key, whatever the numbers of ranks.

Fails, for example, if RowStream reads the bases before the newer checkpoints (without `reversed`), if it adds the keys
of one checkpoint to `newer` only if they have rows, not if they were erased, or if it adds them before the rows of the
same checkpoint are through.
"""

from itertools import pairwise
from pathlib import Path

import pytest

from nestpipe.checkpoint.shards import ShardReader
from nestpipe.checkpoint.tools.row_stream import RowStream, split_buckets
from nestpipe.checkpoint.tools.saved import open_chain
from tests.checkpoint.made import TABLES, Content, content_of, saved_chain, write_as_ranks


def streamed(checkpoint: Path, num_ranges: int = 1) -> Content:
    """Returns all rows, and checks that no key comes twice."""
    chain = open_chain(checkpoint)
    content: Content = {table.name: {} for table in TABLES}
    dtypes = {table.name: table.dtype for table in TABLES}
    bounds = [65536 * i // num_ranges for i in range(num_ranges + 1)]
    for first, end in pairwise(bounds):
        for table, keys, records, steps in RowStream(chain).rows(range(first, end)):
            assert not content[table].keys() & set(keys.tolist())
            pairs = zip(records.contiguous().view(dtypes[table]).tolist(), steps.tolist(), strict=True)
            content[table] |= dict(zip(keys.tolist(), pairs, strict=True))
    return content


@pytest.mark.parametrize("num_ranges", [1, 7])
def test_each_checkpoint_of_a_chain(num_ranges: int, tmp_path: Path) -> None:
    """Fails also if keys outside of a range are not left out."""
    program, paths = saved_chain(tmp_path / "run")
    assert streamed(paths[-1], num_ranges) == content_of(program.store)
    assert len(streamed(paths[0])["item"]) == 300
    second = streamed(paths[1])["item"]
    assert {key for key in range(1001) if key in second} == {*range(250), 255, *range(260, 300), 1000}


def item(keys: list[int], value: float, step: int) -> Content:
    return {"item": {key: ([value] * 6, step) for key in keys}, "user/id": {key: ([value] * 2, step) for key in keys}}


def changed(content: Content, change: Content, erased: dict[str, list[int]]) -> Content:
    return {
        table: {key: row for key, row in rows.items() if key not in erased.get(table, [])} | change[table]
        for table, rows in content.items()
    }


def test_a_chain_of_different_numbers_of_ranks(tmp_path: Path) -> None:
    """Bases by 3 ranks and by 2, changes by 5: the shards of one have other buckets than those of the others."""
    content, path = item(list(range(500)), 1.0, 0), None
    path = write_as_ranks(tmp_path, 1, content, {}, 3, 4, None)
    second = item(list(range(100)), 2.0, 1), {"item": [200, 201]}
    path = write_as_ranks(tmp_path, 2, *second, 2, 3, path)
    third = item([0, 200, 600], 3.0, 2), {"item": [1], "user/id": [7, 499]}
    path = write_as_ranks(tmp_path, 3, *third, 5, 1, path)
    expected = changed(changed(content, *second), *third)
    assert streamed(path) == expected
    assert streamed(path, 11) == expected


@pytest.mark.parametrize("rows_before_erased", [False, True])
def test_a_key_that_was_erased_and_written_again(rows_before_erased: bool, tmp_path: Path) -> None:
    """Rows that were kept aside may come before the block of erased keys. Fails if the order in the file counts."""
    base = write_as_ranks(tmp_path, 1, item([1, 2, 3], 1.0, 0), {}, 1, 2, None)
    change = write_as_ranks(tmp_path, 2, item([2], 2.0, 1), {"item": [2, 3]}, 1, 2, base, None, rows_before_erased)
    assert {key: record[0] for key, (record, _) in streamed(change)["item"].items()} == {1: 1.0, 2: 2.0}


def test_ranges_of_buckets(tmp_path: Path) -> None:
    """Ranges end where shards end, as long as they are small enough; smaller ones cut shards."""
    path = write_as_ranks(tmp_path, 1, item(list(range(4000)), 1.0, 0), {}, 2, 4, None)
    shards = open_chain(path)[-1].shards
    total = sum(shard.num_keys for shard in shards)
    ends = {shard.file.buckets.stop for shard in shards}
    for most in (10 * total, total // 3, total // 8 + 200, 100):
        ranges = split_buckets(shards, lambda shard: shard.num_keys, most)
        assert [bucket for one in ranges for bucket in (one.start, one.stop)][1:-1] == [
            bucket for one in ranges[:-1] for bucket in (one.stop, one.stop)
        ]
        assert (ranges[0].start, ranges[-1].stop) == (0, 65536)
        if most > total // 8 + 100:
            assert {one.stop for one in ranges} <= ends
        sizes = [
            sum(s.num_keys * len(set(one) & set(s.file.buckets)) / len(s.file.buckets) for s in shards)
            for one in ranges
        ]
        assert max(sizes) <= most + 1
    assert split_buckets([], lambda shard: 0, 1) == [range(65536)]


def test_a_shard_is_read_once_if_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a range of buckets does not end where shards end."""
    path = write_as_ranks(tmp_path, 1, item(list(range(1000)), 1.0, 0), {}, 2, 4, None)
    read: list[str] = []
    blocks = ShardReader.blocks
    monkeypatch.setattr(ShardReader, "blocks", lambda reader: read.append(reader.path.name) or blocks(reader))
    chain = open_chain(path)
    for buckets in split_buckets(chain[-1].shards, lambda shard: shard.num_keys, 600):
        assert sum(len(rows.keys) for rows in RowStream(chain).rows(buckets)) <= 600
    assert sorted(read) == [f"rank{rank:05d}-shard{s:03d}.rows" for rank in range(2) for s in range(4)]


def test_blocks_are_not_kept(tmp_path: Path) -> None:
    """What RowStream holds between two blocks are keys of newer checkpoints, not records. Fails without the `clone` of
    keys, which are part of a block's memory."""
    base = write_as_ranks(tmp_path, 1, item(list(range(3000)), 1.0, 0), {}, 1, 1, None)
    last = write_as_ranks(tmp_path, 2, item([5, 6, 7, 8], 2.0, 1), {}, 1, 1, base)
    stream = RowStream(open_chain(last)).rows(range(65536))
    num_checked = 0
    for _ in stream:
        for held in (value for value in stream.gi_frame.f_locals.values() if isinstance(value, dict)):
            for value in held.values():
                for tensor in value if isinstance(value, list) else [value]:
                    assert tensor.untyped_storage().nbytes() <= 4 * 8
                    num_checked += 1
    assert num_checked > 0
