"""Dedup, matching and grouping by owner against the oracle.

Fails, for example, if number_places takes every key of a stretch for a new one (`is_new = true`), or if group_by_owner
hashes without the table's salt.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.store import dict_store, group_by_owner, hash_keys, match_tables, unique
from nestpipe.store.oracle_values import hash_key, mix64
from tests.streams import key_streams

KEY_LISTS = st.lists(st.one_of(st.integers(0, 20), st.integers(-(2**63), 2**63 - 1)), max_size=300)


@pytest.mark.parametrize("stream", key_streams())
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_unique_of_streams(stream: str, num_threads: int) -> None:
    keys = torch.cat(key_streams()[stream]).repeat(300)  # long enough for several threads
    for got, expected in zip(unique(keys, num_threads), dict_store.unique(keys), strict=True):
        assert torch.equal(got, expected)


@given(keys=KEY_LISTS)
def test_unique_of_any_keys(keys: list[int]) -> None:
    tensor = torch.tensor(keys, dtype=torch.int64)
    for got, expected in zip(unique(tensor), dict_store.unique(tensor), strict=True):
        assert torch.equal(got, expected)


def test_unique_into_given_memory() -> None:
    keys = torch.randint(100, (5000,))
    out = torch.empty_like(keys), torch.empty_like(keys)
    distinct, inverse = unique(keys, 1, out)
    assert distinct.data_ptr() == out[0].data_ptr()
    assert torch.equal(distinct[inverse], keys)
    with pytest.raises(ValueError, match=r"out must have shape \[5000\], got \[4999\]"):
        unique(keys, 1, (out[0], out[1][1:]))


def test_unique_refuses_memory_that_overlaps() -> None:
    keys = torch.randint(-(2**62), 2**62, (40_000,))
    out = torch.empty_like(keys)
    both = torch.empty(40_001, dtype=torch.int64)
    for distinct, inverse in ((out, out), (both[1:], both[:-1]), (keys, out), (out, keys)):
        with pytest.raises(ValueError, match="overlap in memory"):
            unique(keys, 2, (distinct, inverse))
    with pytest.raises(ValueError, match="num_threads is 4294967297"):
        unique(keys, 2**32 + 1)


DISTINCT = st.lists(st.one_of(st.integers(0, 20), st.integers(-(2**63), 2**63 - 1)), max_size=50, unique=True)


@given(tables=st.lists(st.tuples(DISTINCT, DISTINCT), max_size=5), num_threads=st.integers(1, 2))
def test_match_tables(tables: list[tuple[list[int], list[int]]], num_threads: int) -> None:
    def joined(lists: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
        return torch.tensor([key for keys in lists for key in keys], dtype=torch.int64), offsets

    arguments = *joined([before for before, _ in tables]), *joined([keys for _, keys in tables])
    assert torch.equal(match_tables(*arguments, num_threads), dict_store.match_tables(*arguments))


def test_match_tables_refuses_offsets_that_do_not_fit() -> None:
    keys, offsets = torch.arange(4), torch.tensor([0, 1, 4])
    assert match_tables(keys, offsets, keys, torch.tensor([0, 2, 4])).tolist() == [0, -1, 2, 3]
    for wrong in ([0, 1, 5], [0, 5, 4], [1, 2, 4]):
        with pytest.raises(ValueError, match="before_offsets of 2 tables do not rise from 0 to the number of keys, 4"):
            match_tables(keys, torch.tensor(wrong), keys, offsets)
    with pytest.raises(ValueError, match=r"before_offsets must have shape \[3\], got \[2\]"):
        match_tables(keys, offsets[:2], keys, offsets)


@given(keys=KEY_LISTS, world_size=st.integers(1, 9))
def test_group_by_owner(keys: list[int], world_size: int) -> None:
    tensor = torch.tensor(keys, dtype=torch.int64)
    got, expected = group_by_owner("item", tensor, world_size), dict_store.group_by_owner("item", tensor, world_size)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_owners_share_evenly_and_a_bucket_stays_whole() -> None:
    keys = torch.arange(200_000)
    for world_size in (2, 3, 1000):
        counts = group_by_owner("item", keys, world_size)[1]
        expected = len(keys) / world_size
        assert (counts - expected).abs().max() < 6 * expected**0.5 + expected * world_size / 65536
    order, counts = group_by_owner("item", keys, 3)
    buckets = hash_keys("item", keys) >> 48 & 0xFFFF
    owned = [set(buckets[part].tolist()) for part in order.split(counts.tolist())]
    assert not owned[0] & owned[1]
    assert not owned[1] & owned[2]


def test_hashes() -> None:
    keys = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    assert [value & 2**64 - 1 for value in hash_keys("größe", keys).tolist()] == [
        hash_key(key, "größe") for key in keys.tolist()
    ]
    assert mix64(1) == 0x5692161D100B05E5
    with pytest.raises(ValueError, match="NUL character"):
        hash_keys("item\0x", keys)
    with pytest.raises(ValueError, match="world_size is 0"):
        group_by_owner("item", keys, 0)
