"""Dedup by owner and the lists of an exchange, against plain loops over dicts and lists.

Fails, for example, if Dedup of csrc/src/plan.cpp sorts by table before owner, or if list_parts of csrc/src/exchange.cpp
mixes own keys with those of others.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.store.native import plan_ops
from tests.store.native.key_batches import (
    KEYS,
    WORLD_SIZES,
    Batch,
    Feature,
    batches,
    dedup,
    feature_keys,
    integers,
    owner,
)


def expected_dedup(batch: Batch, world_size: int) -> tuple[list[int], list[list[int]], list[int]]:
    firsts: dict[tuple[int, int], None] = {}
    for feature in batch.features:
        firsts.update(dict.fromkeys((feature.table, key) for key in feature.flat if key != feature.padding))
    owned = [(owner(key, batch.names[table], world_size), table, key) for table, key in firsts]
    owned.sort(key=lambda entry: entry[:2])  # stable
    positions = {(table, key): i for i, (_, table, key) in enumerate(owned)}
    counts = [[0] * batch.num_tables for _ in range(world_size)]
    for rank, table, _ in owned:
        counts[rank][table] += 1
    occurrence_positions = [
        -1 if key == feature.padding else positions[feature.table, key]
        for feature in batch.features
        for key in feature.flat
    ]
    return [key for _, _, key in owned], counts, occurrence_positions


@given(batch=batches(), world_size=WORLD_SIZES)
@settings(max_examples=60, deadline=None)
def test_dedup(batch: Batch, world_size: int) -> None:
    keys, counts, positions = expected_dedup(batch, world_size)
    got = dedup(batch, world_size)
    assert got.outside is None
    assert got.keys.tolist() == keys
    assert got.counts.tolist() == counts
    assert got.positions.tolist() == positions


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("num_large", [0, 1])
def test_dedup_with_threads(padding: int | None, num_large: int) -> None:
    random = np.random.default_rng(num_large)
    sizes = [70_000] * num_large + [400] * 100
    features = [
        Feature([random.integers(0, size, size).tolist()], table, padding)
        for table, size in enumerate(sizes)
        for _ in range(2 - num_large)
    ]
    batch = Batch(features, len(sizes), 1)
    single, several = dedup(batch, 1536), dedup(batch, 1536, 3)
    keys, counts, positions = expected_dedup(batch, 1536)
    assert single.keys.tolist() == keys
    assert single.counts.tolist() == counts
    assert single.positions.tolist() == positions
    for one, other in zip(single[:3], several[:3], strict=True):
        assert torch.equal(one, other)


def test_dedup_finds_the_first_key_outside() -> None:
    inside = Feature([[0, 4, -7]], 0, padding=-7, limit=5)
    for wrong in (5, -1, 2**63 - 1, -(2**63)):
        outside = Feature([[1, -7], [wrong, wrong]], 1, padding=-7, limit=5)
        free = Feature([[wrong]], 1)
        assert dedup(Batch([inside, free, outside, outside], 2, 2), 3).outside == (2, 2)
    assert dedup(Batch([inside, inside], 1, 1), 3).outside is None


def test_dedup_refusals() -> None:
    salts = plan_ops.table_salts(["a", "b"])
    rows, _keys = feature_keys([Feature([[1]], 0), Feature([[2]], 1)])
    with pytest.raises(ValueError, match="features must be ordered by table"):
        plan_ops.dedup(np.ascontiguousarray(rows[::-1]), salts, 2)
    with pytest.raises(ValueError, match="feature 1: there is no table number 1 of 1"):
        plan_ops.dedup(rows, salts[:1], 2)
    for world_size in (0, 65537):
        with pytest.raises(ValueError, match=f"world_size is {world_size}"):
            plan_ops.dedup(rows, salts, world_size)
    with pytest.raises(ValueError, match="contiguous int64 array"):
        plan_ops.dedup(rows[:, :5], salts, 2)
    with pytest.raises(TypeError, match="salts must be"):
        plan_ops.dedup(rows, salts.to(torch.int32), 2)
    with pytest.raises(ValueError, match="num_threads is 0"):
        plan_ops.dedup(rows, salts, 2, 0)


def test_salts() -> None:
    names = ["a", "größe", "item"]
    for name, salt in zip(names, plan_ops.table_salts(names).tolist(), strict=True):
        batch = Batch([Feature([list(range(50))], 0)], 1, 1)
        rows, _keys = feature_keys(batch.features)
        counts = plan_ops.dedup(rows, integers([salt]), 5).counts
        owners = [owner(key, name, 5) for key in range(50)]
        assert counts.flatten().tolist() == [owners.count(rank) for rank in range(5)]


def counted(lists: list[list[list[int]]]) -> Tensor:
    return torch.tensor([[len(keys) for keys in tables] for tables in lists], dtype=torch.int32)


def check_owner_dedup(lists: list[list[list[int]]], num_threads: int = 1) -> None:
    """Compares owner_dedup with plain loops. lists[rank][table]: keys."""
    distinct: list[int] = []
    slots: dict[tuple[int, int], int] = {}
    table_counts = []
    for table in range(len(lists[0])):
        firsts = dict.fromkeys(key for tables in lists for key in tables[table])
        for key in firsts:
            slots[table, key] = len(distinct)
            distinct.append(key)
        table_counts.append(len(firsts))
    keys = [key for tables in lists for table_keys in tables for key in table_keys]
    expected_slots = [slots[t, key] for tables in lists for t, table_keys in enumerate(tables) for key in table_keys]
    got = plan_ops.owner_dedup(integers(keys), counted(lists), num_threads)
    assert [array.tolist() for array in got] == [distinct, expected_slots, table_counts]


@given(data=st.data(), num_ranks=st.sampled_from([1, 2, 40]), num_tables=st.sampled_from([1, 3, 17]))
@settings(max_examples=60, deadline=None)
def test_owner_dedup(data: st.DataObject, num_ranks: int, num_tables: int) -> None:
    lists: list[list[list[int]]] = [[[] for _ in range(num_tables)] for _ in range(num_ranks)]
    place = st.tuples(st.integers(0, num_ranks - 1), st.integers(0, num_tables - 1), st.lists(KEYS, max_size=5))
    for rank, table, keys in data.draw(st.lists(place, max_size=20)):
        lists[rank][table].extend(keys)
    check_owner_dedup(lists)


@pytest.mark.parametrize("num_large", [0, 1])
def test_owner_dedup_with_threads(num_large: int) -> None:
    random = np.random.default_rng(num_large)
    sizes = [25_000] * num_large + [300] * 100
    lists = [[random.integers(0, size, size).tolist() for size in sizes] for _ in range(3)]
    check_owner_dedup(lists)
    check_owner_dedup(lists, 3)


def test_owner_dedup_refusals() -> None:
    counts = torch.tensor([[1, 0], [1, 1]], dtype=torch.int32)
    for num_keys in (2, 4):
        with pytest.raises(ValueError, match=f"the number of keys, {num_keys}"):
            plan_ops.owner_dedup(torch.arange(num_keys), counts)
    with pytest.raises(ValueError, match=r"counts\[1, 1\] is -1"):
        plan_ops.owner_dedup(torch.arange(2), counts - torch.tensor([[0, 0], [0, 2]], dtype=torch.int32))
    with pytest.raises(TypeError, match=r"counts must be torch.int32"):
        plan_ops.owner_dedup(torch.arange(3), counts.to(torch.int64))


CHOOSE: dict[str, Callable[[list[int]], list[int]]] = {
    "first": lambda parts: parts[:1],
    "last": lambda parts: parts[-1:],
    "all": lambda parts: parts,
}


@given(data=st.data(), which=st.sampled_from(["first", "last", "all"]), num_parts=st.sampled_from([1, 3, 8, 9, 20]))
@settings(max_examples=80, deadline=None)
def test_exchange_lists(data: st.DataObject, which: str, num_parts: int) -> None:
    rank_counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    own_rank = data.draw(st.integers(0, len(rank_counts) - 1))
    ranks = [rank for rank, count in enumerate(rank_counts) for _ in range(count)]
    least = 0 if which == "all" else 1
    parts = st.sets(st.integers(0, num_parts - 1), min_size=least).map(sorted)
    used = data.draw(st.lists(parts, min_size=len(ranks), max_size=len(ranks)))
    uses = torch.zeros(len(ranks), (num_parts + 7) // 8, dtype=torch.uint8)
    for i, key_parts in enumerate(used):
        for part in key_parts:
            uses[i, part // 8] += 1 << part % 8
    places, offsets, counts = [], [0], []
    for part in range(num_parts):
        listed = [i for i, key_parts in enumerate(used) if part in CHOOSE[which](key_parts)]
        for own in (False, True):
            places.extend(i for i in listed if (ranks[i] == own_rank) == own)
            offsets.append(len(places))
        others = [ranks[i] for i in listed if ranks[i] != own_rank]
        counts.append([others.count(rank) for rank in range(len(rank_counts))])
    for capacity in (None, len(places), len(places) + 3):
        got = plan_ops.exchange_lists(uses, num_parts, which, integers(rank_counts), own_rank, capacity)
        assert [array.tolist() for array in got] == [places, offsets, counts]
    if places:
        for too_small in (0, len(places) - 1):
            with pytest.raises(ValueError, match=f"places has room for {too_small} of {len(places)} keys"):
                plan_ops.exchange_lists(uses, num_parts, which, integers(rank_counts), own_rank, too_small)


def test_exchange_lists_refusals() -> None:
    uses, rank_counts = torch.tensor([[1], [0], [4]], dtype=torch.uint8), integers([1, 2])
    plan_ops.exchange_lists(uses, 3, "all", rank_counts, 0)
    for which in ("first", "last"):
        with pytest.raises(ValueError, match="no part uses key 1"):
            plan_ops.exchange_lists(uses, 3, which, rank_counts, 0)
    with pytest.raises(ValueError, match="bits of parts beyond the last, 1"):
        plan_ops.exchange_lists(uses, 2, "all", rank_counts, 0)
    with pytest.raises(ValueError, match="the sum of rank_counts is 2"):
        plan_ops.exchange_lists(uses, 3, "all", integers([1, 1]), 0)
    for wrong in ([4, -1], [-1, 4], [1, 3]):
        with pytest.raises(ValueError, match=r"rank_counts\[[01]\] is"):
            plan_ops.exchange_lists(uses, 3, "all", integers(wrong), 0)
    with pytest.raises(ValueError, match=r"own_rank is 2, must be 0 \.\. 1"):
        plan_ops.exchange_lists(uses, 3, "all", rank_counts, 2)
    with pytest.raises(ValueError, match="which is 'some'"):
        plan_ops.exchange_lists(uses, 3, "some", rank_counts, 0)
    with pytest.raises(ValueError, match=r"uses must have shape \[3, 2\]"):
        plan_ops.exchange_lists(uses, 9, "all", rank_counts, 0)


@given(counts=st.lists(st.lists(st.sampled_from([0, 0, 1, 5]), min_size=19, max_size=19), max_size=40))
@settings(max_examples=30, deadline=None)
def test_cluster_numbers(counts: list[list[int]]) -> None:
    next_numbers, expected = [100 * table for table in range(19)], []
    for row in counts:
        for table, count in enumerate(row):
            expected.extend(range(next_numbers[table], next_numbers[table] + count))
            next_numbers[table] += count
    matrix = torch.tensor(counts, dtype=torch.int32).reshape(-1, 19)
    assert plan_ops.cluster_numbers(matrix, torch.arange(19) * 100, len(expected)).tolist() == expected
    with pytest.raises(ValueError, match="the sum of counts"):
        plan_ops.cluster_numbers(matrix, torch.arange(19), len(expected) + 1)


def test_copy_runs() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(10, dtype=torch.int64)
    plan_ops.copy_runs(source, np.array([90, 0, 5]), target, integers([0, 79, 80]), np.array([10, 1, 0]))
    as_bytes = target.view(torch.uint8).tolist()
    assert as_bytes == [*range(90, 100), *[0] * 69, 0]
    plan_ops.copy_runs(source[:0], integers([]), target, integers([]), integers([]))
    for start, to, size in (
        (91, 0, 10),
        (-1, 0, 1),
        (0, 71, 10),
        (0, -1, 1),
        (0, 0, -1),
        (0, 0, 2**63 - 1),
        (101, 0, 0),
    ):
        with pytest.raises(ValueError, match="run 1 of"):
            plan_ops.copy_runs(source, integers([0, start]), target, integers([0, to]), integers([1, size]))
    with pytest.raises(ValueError, match="from_offsets must be a contiguous int64 array"):
        plan_ops.copy_runs(source, np.array([0, 1]), target, integers([0]), integers([1]))
    with pytest.raises(ValueError, match="source must be contiguous"):
        plan_ops.copy_runs(source[::2], integers([0]), target, integers([0]), integers([1]))
