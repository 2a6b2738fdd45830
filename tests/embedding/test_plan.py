"""Requester and owner plan alike: what one sends is what the other expects, row by row and byte by byte.

All ranks of a small world route and plan in threads of this process; then their plans are compared. Fails, for example,
if _lists sends gradients with the "first" micro-batch, if _group_plan does not turn positions into rows for a single
micro-batch, if _lay_out pads rows to 8 bytes, or if message_unit returns the bytes of a row.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe import Batch, Pooled, Sequence, Table
from nestpipe.data import Jagged
from nestpipe.distributed import Channel, Notice
from nestpipe.embedding.cluster import GIVEN_ORDER
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.exchange.distributed import DistributedExchange
from nestpipe.embedding.group import group_features
from nestpipe.embedding.host_memory import HostMemory
from nestpipe.embedding.plan import (
    ALIGNMENT,
    GroupPlan,
    MessageSizes,
    Plan,
    TravelList,
    _lay_out,
    _rows_of_positions,
    make_plan,
    message_unit,
)
from nestpipe.embedding.resident import ResidentRows
from nestpipe.embedding.route import Route, route_keys
from tests.embedding.thread_ranks import on_threads
from tests.store.native.key_batches import owner

A, B = Table("a", 5), Table("b", 5)
C, D = Table("c", 3, dtype=torch.float64), Table("d", 1, frozen=True)
FEATURES = group_features(
    {"b_keys": Pooled(B), "a_keys": Pooled(A), "c_keys": Sequence(C), "a_keys_again": Pooled(A), "d_keys": Pooled(D)}
)
"""Three groups, with rows of 20, 24 and 4 bytes."""
WINDOWS = ("once", "resend")

Key = tuple[str, int]
"""Table and key."""


@dataclass(frozen=True)
class World:
    batches: list[Batch | None]
    """Batch of each rank; None if it is out of data."""
    num_micro_batches: int

    @property
    def size(self) -> int:
        return len(self.batches)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draws up to 4 ranks, some without a batch; few keys, so that ranks and micro-batches share them."""
    batches: list[Batch | None] = []
    for _ in range(draw(st.integers(2, 4))):
        num_samples = draw(st.integers(0, 4))
        lists = st.lists(st.lists(st.integers(-2, 9), max_size=3), min_size=num_samples, max_size=num_samples)
        keys = {name: Jagged.from_lists(draw(lists)) for name in FEATURES.features}
        batches.append(Batch(keys) if draw(st.integers(0, 5)) else None)
    return World(batches, draw(st.sampled_from([1, 2, 3, 9])))


def routed(channel: Channel, world: World) -> Route | None:
    batch = dedup_batch(FEATURES, world.batches[channel.rank], world.num_micro_batches, world.size, 1, GIVEN_ORDER)
    return route_keys(batch, FEATURES, channel, Notice())


@dataclass(frozen=True)
class Rank:
    """A rank's route and plan, and the keys behind its places."""

    number: int
    route: Route
    plan: Plan

    def positions(self, g: int) -> list[Key]:
        dedup = self.route.batch.groups[g]
        tables = np.tile(np.arange(len(dedup.group.tables)), len(dedup.counts)).repeat(dedup.counts.flatten().numpy())
        return [(dedup.group.names[t], key) for t, key in zip(tables, dedup.keys.tolist(), strict=True)]

    def requester_places(self, g: int) -> list[Key]:
        """Returns the keys behind rows_in and gradients_out: by position, or with one micro-batch by row."""
        positions, dedup = self.positions(g), self.route.batch.groups[g]
        one = self.route.batch.num_micro_batches == 1
        return [positions[p] for p in dedup.row_positions.tolist()] if one else positions

    def slots(self, g: int) -> list[Key]:
        dedup = self.route.owner_dedups[g]
        tables = np.arange(len(dedup.group.tables)).repeat(dedup.table_offsets.diff().numpy())
        return [(dedup.group.names[t], key) for t, key in zip(tables, dedup.keys.tolist(), strict=True)]

    def entries(self, g: int) -> list[Key]:
        slots = self.slots(g)
        return [slots[slot] for slot in self.route.owner_dedups[g].key_index.tolist()]

    def uses(self, g: int) -> dict[Key, list[int]]:
        """Returns the micro-batches that use each key, ascending, from the batch itself."""
        dedup, batch = self.route.batch.groups[g], self.route.batch
        positions = self.positions(g)
        micro_batches: dict[Key, list[int]] = {key: [] for key in positions}
        for i in range(batch.num_micro_batches):
            for f, t in enumerate(dedup.group.feature_tables.tolist()):
                first = int(dedup.row_counts[i, :t].sum())
                rows = dedup.row_positions[dedup.rows_of(i)][first : first + int(dedup.row_counts[i, t])]
                for row in dedup.occurrences.part(i, f).index.unique().tolist():
                    key = positions[int(rows[row])]
                    micro_batches[key] += [i] if i not in micro_batches[key] else []
        return micro_batches


def planned(world: World, window: str) -> list[Rank]:
    routes = on_threads(world.size, routed, world)
    return [
        Rank(r, route, make_plan(route, window, r, lambda group: group.row_bytes))
        for r, route in enumerate(routes)
        if route is not None
    ]


@dataclass(frozen=True)
class Row:
    """A row in a message; bytes are counted from the start of its rank's part."""

    group: int
    key: Key
    first: int
    end: int


def in_message(rank: Rank, which: str, places: list[list[Key]], i: int) -> dict[int, list[Row]]:
    """Returns the rows of micro-batch i by the other rank, at their places in the message."""
    sizes: MessageSizes = getattr(rank.plan, which)
    starts = np.cumsum([0, *sizes.sizes[i]])
    assert starts[-1] == sizes.num_bytes[i]
    rows_by_rank: dict[int, list[Row]] = {other: [] for other in range(len(sizes.sizes[i]))}
    for g, lists in enumerate(rank.plan.groups):
        travel: TravelList = getattr(lists, which)
        row_bytes, in_units = lists.group.row_bytes, travel.in_message(i)
        others, keys = np.arange(len(travel.counts[i])).repeat(travel.counts[i]), travel.others(i).tolist()
        assert travel.counts[i, rank.number] == 0
        unit = row_bytes if in_units is None else message_unit(row_bytes)
        units = range(len(keys)) if in_units is None else in_units.tolist()
        for other, place, number in zip(others.tolist(), keys, units, strict=True):
            first = number * unit - int(starts[other])
            assert 0 <= first <= sizes.sizes[i][other] - row_bytes
            rows_by_rank[other].append(Row(g, places[g][place], first, first + row_bytes))
    check_bytes(rows_by_rank, sizes, i)
    return rows_by_rank


def check_bytes(rows_by_rank: dict[int, list[Row]], sizes: MessageSizes, i: int) -> None:
    """Checks that no two rows share a byte, and that a group begins at a multiple of 16 bytes."""
    assert sizes.row_bytes[i] == sum(row.end - row.first for rows in rows_by_rank.values() for row in rows)
    for other, rows in rows_by_rank.items():
        assert sizes.sizes[i][other] % ALIGNMENT == 0
        taken = [byte for row in rows for byte in range(row.first, row.end)]
        assert len(taken) == len(set(taken))
        for g in {row.group for row in rows}:
            assert min(row.first for row in rows if row.group == g) % ALIGNMENT == 0


def check_direction(ranks: list[Rank], sent: str, received: str, i: int) -> None:
    """Checks that sender and receiver have the same view of each message."""
    numbers = {
        "rows_out": Rank.slots,
        "rows_in": Rank.requester_places,
        "gradients_out": Rank.requester_places,
        "gradients_in": Rank.entries,
    }
    groups = range(len(FEATURES.groups))
    out = [in_message(rank, sent, [numbers[sent](rank, g) for g in groups], i) for rank in ranks]
    into = [in_message(rank, received, [numbers[received](rank, g) for g in groups], i) for rank in ranks]
    for a, sender in enumerate(ranks):
        for b, receiver in enumerate(ranks):
            sizes = getattr(sender.plan, sent).sizes[i][b], getattr(receiver.plan, received).sizes[i][a]
            assert sizes[0] == sizes[1]
            assert out[a][b] == into[b][a]
    for rank in ranks:
        for g, lists in enumerate(rank.plan.groups):
            own = getattr(lists, sent).own(i).tolist(), getattr(lists, received).own(i).tolist()
            keys = [
                [numbers[way](rank, g)[p] for p in places] for way, places in zip((sent, received), own, strict=True)
            ]
            assert keys[0] == keys[1]


def travelling(rank: Rank, lists: GroupPlan, g: int, which: str) -> dict[Key, list[int]]:
    """Returns the micro-batches with which each key of a requester travels."""
    travels: dict[Key, list[int]] = {}
    places, travel = rank.requester_places(g), getattr(lists, which)
    for i in range(rank.route.batch.num_micro_batches):
        for place in [*travel.others(i).tolist(), *travel.own(i).tolist()]:
            travels.setdefault(places[place], []).append(i)
    return travels


def check_when(rank: Rank, window: str) -> None:
    """Checks with which micro-batches rows and gradients travel: "once" first and last, "resend" with every user."""
    for g, lists in enumerate(rank.plan.groups):
        uses = rank.uses(g)
        rows, gradients = (travelling(rank, lists, g, which) for which in ("rows_in", "gradients_out"))
        assert rows == {key: users[:1] if window == "once" else users for key, users in uses.items()}
        back = {key: users[-1:] if window == "once" else users for key, users in uses.items()}
        assert gradients == ({} if lists.group.frozen else back)


def check_owner(ranks: list[Rank], rank: Rank, window: str) -> None:
    """Checks that every key of a requester is one entry, and that the entries of a slot are in order of requester."""
    for g, lists in enumerate(rank.plan.groups):
        entries, slots = rank.entries(g), rank.slots(g)
        asked = [
            (r.number, key) for r in ranks for key in r.positions(g) if owner(key[1], key[0], len(ranks)) == rank.number
        ]
        requesters = np.arange(len(ranks)).repeat(rank.route.owner_dedups[g].entry_counts).tolist()
        assert list(zip(requesters, entries, strict=True)) == asked
        assert len(entries) == lists.num_entries
        assert len(set(slots)) == len(slots)
        assert set(slots) == set(entries)
        assert lists.sums.offsets is not None
        assert lists.sums.order is not None
        slot_entries = lists.sums.order.split(lists.sums.offsets.diff().tolist())
        for slot, places in zip(slots, slot_entries, strict=True):
            assert places.tolist() == [e for e, key in enumerate(entries) if key == slot]
        arriving = Counter(
            place
            for i in range(rank.route.batch.num_micro_batches)
            for place in [*lists.gradients_in.others(i).tolist(), *lists.gradients_in.own(i).tolist()]
        )
        if window == "once" and not lists.group.frozen:
            assert arriving == Counter(range(len(entries)))


@settings(max_examples=30, deadline=None)
@given(world=worlds(), window=st.sampled_from(WINDOWS))
def test_requesters_and_owners_agree(world: World, window: str) -> None:
    ranks = planned(world, window)
    assert len(ranks) in (0, world.size)
    for i in range(world.num_micro_batches):
        if ranks:
            check_direction(ranks, "rows_out", "rows_in", i)
            check_direction(ranks, "gradients_out", "gradients_in", i)
    for rank in ranks:
        check_when(rank, window)
        check_owner(ranks, rank, window)


@settings(max_examples=30, deadline=None)
@given(world=worlds(), size=st.sampled_from([2, 3, 1536]))
def test_rows_of_a_single_micro_batch(world: World, size: int) -> None:
    """Rows are ordered by table, positions by owner. Fails if by_table of _rows_of_positions sums counts by owner."""
    for batch in world.batches:
        for dedup in dedup_batch(FEATURES, batch, 1, size).groups:
            expected = torch.empty_like(dedup.row_positions)
            expected[dedup.row_positions] = torch.arange(len(expected))
            assert torch.equal(_rows_of_positions(dedup.counts.numpy()), expected)


def row_of(key: Key, dim: int) -> list[float]:
    return [sum(map(ord, key[0])) * 100 + key[1] + 0.125 * column for column in range(dim)]


def exchanged(channel: Channel, world: World, window: str) -> list[dict[Key, list[float]]]:
    """Sends rows, checks those that arrive, and returns the summed gradients of owned keys by group."""
    memory = HostMemory()
    exchange = DistributedExchange(channel, channel, channel, memory)
    route = routed(channel, world)
    if route is None:
        return []
    plan = exchange.plan(route, window)
    assert plan is not None
    rank = Rank(channel.rank, route, plan)
    resident = []
    for g, owned in enumerate(route.owner_dedups):
        records = torch.zeros(2 * len(owned.keys), owned.group.num_columns, dtype=owned.group.dtype)
        slots = torch.randperm(len(records))[: len(owned.keys)]
        for slot, key in zip(slots.tolist(), rank.slots(g), strict=True):
            records[slot, : owned.group.dim] = torch.tensor(row_of(key, owned.group.dim))
        resident.append(ResidentRows(owned.group, owned.keys, owned.table_offsets, records, slots, slots))
    batch = exchange.open(route, plan, resident)
    for i in range(world.num_micro_batches):
        batch.send_rows(i)
        gradients: list[torch.Tensor | None] = []
        for g, rows in enumerate(batch.rows(i)):
            group = route.batch.groups[g]
            keys = [rank.positions(g)[p] for p in group.row_positions[group.rows_of(i)].tolist()]
            assert rows.tolist() == [row_of(key, group.group.dim) for key in keys]
            assert rows.requires_grad is not group.group.frozen
            gradients.append(gradient_of(rows.detach(), channel.rank, i))
        batch.return_gradients(i, gradients)
    assert int(batch.exceeds) == 0
    sums = batch.sum_gradients()
    assert [total is None for total in sums] == [group.frozen for group in FEATURES.groups]
    return [
        dict(zip(rank.slots(g), total.tolist(), strict=True)) if total is not None else {}
        for g, total in enumerate(sums)
    ]


def gradient_of(rows: torch.Tensor, rank: int, micro_batch: int) -> torch.Tensor:
    """Returns numbers whose sum depends on the order of addition."""
    return rows * (1 / 3 + rank) * 7.0**micro_batch


def expected_sums(world: World, g: int) -> dict[Key, torch.Tensor]:
    """Returns sums over a requester's micro-batches in order, then over requesters in order of rank."""
    totals: dict[Key, torch.Tensor] = {}
    group = FEATURES.groups[g]
    for number, batch in enumerate(world.batches):
        dedup = dedup_batch(FEATURES, batch, world.num_micro_batches, world.size, 1, GIVEN_ORDER).groups[g]
        requester_sums: dict[Key, torch.Tensor] = {}
        for i in range(world.num_micro_batches):
            tables = np.arange(len(group.tables)).repeat(dedup.row_counts[i])
            for t, key in zip(tables, dedup.keys[dedup.row_positions[dedup.rows_of(i)]].tolist(), strict=True):
                name = group.names[t], key
                gradient = gradient_of(torch.tensor(row_of(name, group.dim), dtype=group.dtype), number, i)
                requester_sums[name] = requester_sums.get(name, torch.zeros_like(gradient)) + gradient
        for name, gradient in requester_sums.items():
            totals[name] = totals.get(name, torch.zeros_like(gradient)) + gradient
    return totals


@settings(max_examples=20, deadline=None)
@given(world=worlds(), window=st.sampled_from(WINDOWS))
def test_rows_and_gradients_arrive(world: World, window: str) -> None:
    """Sums are equal to the bit. Fails if _Requester.collect returns its sums in window "resend", or adds the first
    gradient to uninitialised memory."""
    results = on_threads(world.size, exchanged, world, window)
    if not any(results):
        return
    for g, group in enumerate(FEATURES.groups):
        if not group.frozen:
            together = {key: total for sums in results for key, total in sums[g].items()}
            assert together == {key: total.tolist() for key, total in expected_sums(world, g).items()}


def travel_list(counts: list[list[int]]) -> TravelList:
    total = sum(map(sum, counts))
    bounds = [0, *np.repeat(np.cumsum([sum(part_counts) for part_counts in counts]), 2).tolist()]
    return TravelList(torch.arange(total), bounds, np.array(counts, dtype=np.int64))


def test_a_message_by_hand() -> None:
    """Two micro-batches among three ranks; rows of 12, 40 and 4 bytes. Rank 1 sends nothing to itself."""
    counts = [[[1, 0, 3], [0, 0, 0]], [[2, 0, 0], [0, 0, 1]], [[0, 0, 5], [1, 0, 0]]]
    sizes, (first, second, third) = _lay_out([travel_list(group_counts) for group_counts in counts], [12, 40, 4])
    assert sizes.sizes == [[16 + 80 + 0, 0, 48 + 0 + 32], [16, 0, 48]]
    assert sizes.row_bytes == [(12 + 80 + 0) + (36 + 0 + 20), 4 + 40]
    assert sizes.num_bytes == [176, 64]
    assert [message_unit(width) for width in (12, 40, 4, 20, 24, 256, 1028)] == [4, 8, 4, 4, 8, 16, 4]
    bytes_of = {"first": (first, 4), "second": (second, 8), "third": (third, 4)}
    row_bytes = {
        name: [(places * unit).tolist() for i in (0, 1) if (places := travel.in_message(i)) is not None]
        for name, (travel, unit) in bytes_of.items()
    }
    assert row_bytes == {
        "first": [[0, 96, 108, 120], []],
        "second": [[16, 56], [16]],
        "third": [[144, 148, 152, 156, 160], [0]],
    }


@pytest.mark.parametrize(("row_bytes", "is_in_order"), [(16, True), (256, True), (12, False)])
def test_rows_without_gaps_need_no_places(row_bytes: int, is_in_order: bool) -> None:
    """Rows of one group that fill 16 bytes are contiguous in their message. Fails if _with_message_places takes padded
    rows for contiguous."""
    _, (travel,) = _lay_out([travel_list([[3, 0, 2], [0, 0, 1]])], [row_bytes])
    assert (travel.in_message(0) is None) == is_in_order
