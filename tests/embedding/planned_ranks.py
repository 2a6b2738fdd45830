"""Small worlds whose ranks route and plan in threads of this process, and checks of their plans."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from nestpipe import Batch, Pooled, Sequence, Table
from nestpipe.data import Jagged
from nestpipe.device.transfer import ALIGNMENT
from nestpipe.distributed import Channel, Notice
from nestpipe.embedding.batch_plan import make_plan
from nestpipe.embedding.cluster import GIVEN_ORDER
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.exchange.distributed import DistributedExchange
from nestpipe.embedding.group import group_features
from nestpipe.embedding.host_memory import HostMemory
from nestpipe.embedding.plan_parts import KeySums, Plan, Returns
from nestpipe.embedding.resident import ResidentRows
from nestpipe.embedding.route import Route, route_keys
from nestpipe.embedding.travel import MessageSizes, TravelList, message_unit
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

    @property
    def num_micro_batches(self) -> int:
        return self.route.batch.num_micro_batches

    @property
    def returns(self) -> Returns:
        assert self.plan.returns is not None
        return self.plan.returns

    def sizes(self, which: str) -> MessageSizes:
        sizes: MessageSizes = getattr(self.plan.sends if which.startswith("rows") else self.returns, which)
        return sizes

    def lists(self, g: int, which: str) -> TravelList:
        travel: TravelList = getattr((self.plan.sends if which.startswith("rows") else self.returns).groups[g], which)
        return travel

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
    sizes = rank.sizes(which)
    starts = np.cumsum([0, *sizes.sizes[i]])
    assert starts[-1] == sizes.num_bytes[i]
    rows_by_rank: dict[int, list[Row]] = {other: [] for other in range(len(sizes.sizes[i]))}
    for g, group in enumerate(FEATURES.groups):
        travel = rank.lists(g, which)
        row_bytes, in_units = group.row_bytes, travel.in_message(i)
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
            sizes = sender.sizes(sent).sizes[i][b], receiver.sizes(received).sizes[i][a]
            assert sizes[0] == sizes[1]
            assert out[a][b] == into[b][a]
    for rank in ranks:
        for g in groups:
            own = rank.lists(g, sent).own(i).tolist(), rank.lists(g, received).own(i).tolist()
            keys = [
                [numbers[way](rank, g)[p] for p in places] for way, places in zip((sent, received), own, strict=True)
            ]
            assert keys[0] == keys[1]


def travelling(rank: Rank, g: int, which: str, num_parts: int) -> dict[Key, list[int]]:
    """Returns the parts with which each key of a requester travels."""
    travels: dict[Key, list[int]] = {}
    places, travel = rank.requester_places(g), rank.lists(g, which)
    for i in range(num_parts):
        for place in [*travel.others(i).tolist(), *travel.own(i).tolist()]:
            travels.setdefault(places[place], []).append(i)
    return travels


def check_when(rank: Rank, window: str, early: set[Key], late: set[Key]) -> None:
    """Checks with which parts rows and gradients travel: "once" first and last, "resend" with every user. An early row
    travels with part 0 instead of the first one, a late gradient with the part after all micro-batches instead of the
    last one."""
    num_early, num_parts = rank.plan.sends.num_early, rank.num_micro_batches + 1
    for g, group in enumerate(FEATURES.groups):
        uses = rank.uses(g)
        rows = travelling(rank, g, "rows_in", rank.num_micro_batches + num_early)
        for key, users in uses.items():
            out = users[:1] if window == "once" else users
            out = [i + num_early for i in out]
            assert rows.pop(key) == ([0, *out[1:]] if key in early else out)
        assert not rows
        gradients = travelling(rank, g, "gradients_out", num_parts if rank.returns.has_late else num_parts - 1)
        for key, users in uses.items() if not group.frozen else ():
            back = users[-1:] if window == "once" else users
            assert gradients.pop(key) == ([*back[:-1], num_parts - 1] if key in late else back)
        assert not gradients


def check_owner(ranks: list[Rank], rank: Rank, window: str, late: set[Key]) -> None:
    """Checks that every key of a requester is one entry, and that the entries of a slot are in order of requester."""
    for g, lists in enumerate(rank.returns.groups):
        entries, slots = rank.entries(g), rank.slots(g)
        asked = [
            (r.number, key) for r in ranks for key in r.positions(g) if owner(key[1], key[0], len(ranks)) == rank.number
        ]
        requesters = np.arange(len(ranks)).repeat(rank.route.owner_dedups[g].entry_counts).tolist()
        assert list(zip(requesters, entries, strict=True)) == asked
        assert len(entries) == lists.num_entries
        assert len(set(slots)) == len(slots)
        assert set(slots) == set(entries)
        summed: list[Key] = []
        for sums, is_late in ((lists.sums, False), (lists.late_sums, True)):
            summed += [] if sums is None else check_sums(sums, slots, entries, late, is_late)
        assert sorted(summed) == sorted(slots)
        arriving = Counter(
            place
            for i in range(rank.num_micro_batches + rank.returns.has_late)
            for place in [*lists.gradients_in.others(i).tolist(), *lists.gradients_in.own(i).tolist()]
        )
        if window == "once" and not lists.group.frozen:
            assert arriving == Counter(range(len(entries)))


def check_sums(sums: KeySums, slots: list[Key], entries: list[Key], late: set[Key], is_late: bool) -> list[Key]:
    """Checks which entries are added for each key, and returns the keys."""
    assert sums.entries.offsets is not None
    assert sums.entries.order is not None
    keys = slots if sums.keys is None else [slots[number] for number in sums.keys.tolist()]
    lists = sums.entries.order.split(sums.entries.offsets.diff().tolist())
    for key, places in zip(keys, lists, strict=True):
        assert (key in late) == is_late
        assert places.tolist() == [e for e, entry in enumerate(entries) if entry == key]
    return keys


def check_ranks(ranks: list[Rank], window: str, early: set[Key], late: set[Key]) -> None:
    if not ranks:
        return
    for i in range(len(ranks[0].plan.sends.rows_in.sizes)):
        check_direction(ranks, "rows_out", "rows_in", i)
    for i in range(len(ranks[0].returns.gradients_in.sizes)):
        check_direction(ranks, "gradients_out", "gradients_in", i)
    for rank in ranks:
        check_when(rank, window, early, late)
        check_owner(ranks, rank, window, late)


def row_of(key: Key, dim: int) -> list[float]:
    return [sum(map(ord, key[0])) * 100 + key[1] + 0.125 * column for column in range(dim)]


def exchanged(
    channel: Channel, world: World, window: str, neighbour: World | None = None
) -> list[dict[Key, list[float]]]:
    """Sends rows, checks those that arrive, and returns the summed gradients of owned keys by group. neighbour: batch
    before this one, and after it; None if nothing crosses."""
    exchange = DistributedExchange(channel, channel, channel, HostMemory())
    route = routed(channel, world)
    other = routed(channel, neighbour) if neighbour is not None else None
    if route is None:
        return []
    early = exchange.compare(other, route, True, 1).early if other is not None else None
    plan = exchange.plan(route, window, early)
    assert plan is not None
    if other is not None:
        plan.returns = exchange.plan_returns(route, window, exchange.compare(route, other, True, 1).late)
    rank = Rank(channel.rank, route, plan)
    resident = []
    for g, owned in enumerate(route.owner_dedups):
        records = torch.zeros(2 * len(owned.keys), owned.group.num_columns, dtype=owned.group.dtype)
        slots = torch.randperm(len(records))[: len(owned.keys)]
        for slot, key in zip(slots.tolist(), rank.slots(g), strict=True):
            records[slot, : owned.group.dim] = torch.tensor(row_of(key, owned.group.dim))
        resident.append(ResidentRows(owned.group, owned.keys, owned.table_offsets, records, slots, slots))
    batch = exchange.open(route, plan, resident)
    if other is not None:
        batch.send_early_rows()
    for i in range(world.num_micro_batches):
        batch.send_rows(i)
        gradients: list[torch.Tensor | None] = []
        for g, rows in enumerate(group.tensor for group in batch.rows(i)):
            group = route.batch.groups[g]
            keys = [rank.positions(g)[p] for p in group.row_positions[group.rows_of(i)].tolist()]
            assert rows.tolist() == [row_of(key, group.group.dim) for key in keys]
            assert rows.requires_grad is not group.group.frozen
            gradients.append(gradient_of(rows.detach(), channel.rank, i))
        batch.return_gradients(i, gradients)
    assert int(batch.exceeds) == 0
    parts = [batch.sum_gradients()]
    assert [total is None for total in parts[0]] == [group.frozen for group in FEATURES.groups]
    if batch.has_late_gradients:
        batch.return_late_gradients()
        parts.append(batch.sum_late_gradients())
    sums: list[dict[Key, list[float]]] = [{} for _ in FEATURES.groups]
    for g, total in ((g, total) for part in parts for g, total in enumerate(part) if total is not None):
        slots = rank.slots(g)
        keys = slots if total.keys is None else [slots[number] for number in total.keys.tolist()]
        assert not set(keys) & set(sums[g])
        sums[g] |= dict(zip(keys, total.values.tolist(), strict=True))
    return sums


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


def check_sums_of(world: World, window: str, neighbour: World | None) -> None:
    results = on_threads(world.size, exchanged, world, window, neighbour)
    if not any(results):
        return
    for g, group in enumerate(FEATURES.groups):
        if not group.frozen:
            together = {key: total for sums in results for key, total in sums[g].items()}
            assert together == {key: total.tolist() for key, total in expected_sums(world, g).items()}
