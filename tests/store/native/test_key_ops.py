"""Dedup, matching, and grouping by owner and by row against the oracle or torch.

Fails, for example, if number_places takes every key of a stretch for a new one (`is_new = true`), or if group_by_owner
hashes without the table's salt.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.store import dict_store, group_by_owner, group_by_row, hash_keys, match_tables, unique
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


def sorted_by_torch(
    index: torch.Tensor, offsets: torch.Tensor | None, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the offsets of the rows, occurrences and samples."""
    occurrences = torch.sort(index, stable=True)[1]
    counts = torch.bincount(index, minlength=num_rows + 1)[:num_rows]
    occurrences = occurrences[: int(counts.sum())]
    samples = occurrences if offsets is None else torch.repeat_interleave(offsets.diff())[occurrences]
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]), occurrences, samples


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("kind", ["empty", "one row", "all equal", "all padding", "descending", "random", "few rows"])
def test_group_by_row_as_torch_sorts(kind: str, has_offsets: bool) -> None:
    """Fails if group_by_row goes through the samples backwards, or leaves out the shift of row_offsets at its end."""
    torch.manual_seed(5)
    num_rows = {"one row": 1, "few rows": 3}.get(kind, 500)
    index = {
        "empty": torch.empty(0, dtype=torch.int64),
        "all equal": torch.full((700,), 499),
        "all padding": torch.full((700,), 500),
        "descending": torch.arange(500, -1, -1),
    }.get(kind, torch.randint(0, num_rows + 1, (5000,)))
    cuts = torch.randint(0, len(index) + 1, (300,)).sort()[0]  # some samples are empty
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([len(index)])]) if has_offsets else None
    row_offsets, occurrences, samples = sorted_by_torch(index, offsets, num_rows)
    for with_occurrences in (False, True):
        got = group_by_row(index, offsets, num_rows, with_occurrences)
        assert torch.equal(got[0], row_offsets)
        assert torch.equal(got[2], samples)
        assert got[1] is None if not with_occurrences else torch.equal(got[1], occurrences)


def test_group_by_row_of_nothing_and_refusals() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert [array.tolist() for array in group_by_row(nothing, None, 3)] == [[0, 0, 0, 0], [], []]
    assert [array.tolist() for array in group_by_row(nothing, torch.tensor([0, 0]), 0)] == [[0], [], []]
    for index in (torch.tensor([0, 4]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match=r"outside 0 \.\. 3"):
            group_by_row(index, None, 3)
    for offsets in (torch.tensor([0, 3]), torch.tensor([0, 1]), torch.tensor([0, -1, 2]), torch.tensor([1, 2])):
        with pytest.raises(ValueError, match="offsets do not rise"):
            group_by_row(torch.tensor([0, 1]), offsets, 3)
    with pytest.raises(TypeError, match=r"keys must be torch\.int64"):
        group_by_row(torch.tensor([0, 1], dtype=torch.int32), None, 3)


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
