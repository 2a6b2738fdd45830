"""Requester and owner plan alike: what one sends is what the other expects, row by row and byte by byte.

All ranks of a small world route and plan in threads of this process; then their plans are compared. Fails, for example,
if group_returns lists gradients with the "first" micro-batch, if _by_row does not turn positions into rows of a single
micro-batch, if lay_out pads rows to 8 bytes, or if message_unit returns the bytes of a row.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.embedding.batch_plan import make_plan
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.plan import plan_returns, plan_sends
from nestpipe.embedding.plan_parts import GroupReturns
from nestpipe.embedding.replica import by_table
from nestpipe.embedding.travel import TravelList, lay_out, message_unit
from tests.embedding.planned_ranks import (
    FEATURES,
    WINDOWS,
    World,
    check_ranks,
    check_sums_of,
    planned,
    routed,
    worlds,
)
from tests.embedding.thread_ranks import on_threads


@settings(max_examples=30, deadline=None)
@given(world=worlds(), window=st.sampled_from(WINDOWS))
def test_requesters_and_owners_agree(world: World, window: str) -> None:
    ranks = planned(world, window)
    assert len(ranks) in (0, world.size)
    check_ranks(ranks, window, set(), set())


@settings(max_examples=30, deadline=None)
@given(world=worlds(), size=st.sampled_from([2, 3, 1536]))
def test_rows_of_a_single_micro_batch(world: World, size: int) -> None:
    """Rows are ordered by table, positions by owner. Fails if first_by_owner of by_table sums counts by owner."""
    for batch in world.batches:
        for dedup in dedup_batch(FEATURES, batch, 1, size).groups:
            expected = torch.empty_like(dedup.row_positions)
            expected[dedup.row_positions] = torch.arange(len(expected))
            assert torch.equal(by_table(dedup.counts.numpy()), expected)


@settings(max_examples=20, deadline=None)
@given(world=worlds(), window=st.sampled_from(WINDOWS))
def test_rows_and_gradients_arrive(world: World, window: str) -> None:
    """Sums are equal to the bit. Fails if Requester.collect returns its sums in window "resend", or adds the first
    gradient to uninitialised memory."""
    check_sums_of(world, window, None)


@settings(max_examples=30, deadline=None)
@given(world=worlds())
def test_gradients_take_the_way_of_rows_back(world: World) -> None:
    """With one micro-batch one native call plans both ways. Fails if list_one_part leaves this rank's own entries among
    those of the others, or orders rows by (rank, table)."""
    for number, route in enumerate(on_threads(world.size, routed, World(world.batches, 1))):
        if route is None:
            continue
        trained = [g for g, owner in enumerate(route.owner_dedups) if not owner.group.frozen]
        batch = replace(route.batch, groups=[route.batch.groups[g] for g in trained])
        lists = [[of_groups[g] for g in trained] for of_groups in (route.owner_dedups, route.replicas)]
        route = replace(route, batch=batch, owner_dedups=lists[0], replicas=lists[1])
        plan = make_plan(route, "once", number, lambda group: group.row_bytes)
        sends = plan_sends(route, "once", number, lambda group: group.row_bytes)
        assert (plan.sends.rows_in, plan.sends.rows_out, plan.sends.num_early) == (sends.rows_in, sends.rows_out, 0)
        for sent, same_sent in zip(plan.sends.groups, sends.groups, strict=True):
            for list_of, same_list in ((sent.rows_in, same_sent.rows_in), (sent.rows_out, same_sent.rows_out)):
                assert list(map(contents, fields_of(list_of))) == list(map(contents, fields_of(same_list)))
        expected = plan_returns(route, "once", number, lambda group: group.row_bytes)
        assert plan.returns is not None
        assert (plan.returns.gradients_in, plan.returns.gradients_out) == (
            expected.gradients_in,
            expected.gradients_out,
        )
        for group, same in zip(plan.returns.groups, expected.groups, strict=True):
            assert list(map(contents, parts(group))) == list(map(contents, parts(same)))


def parts(group: GroupReturns) -> list[object]:
    out, into, order = group.gradients_out, group.gradients_in, group.sums.entries
    pieces = None if order.pieces is None else [*order.pieces.starts.tolist(), *order.pieces.firsts.tolist()]
    return [
        *(*fields_of(out), *fields_of(into), group.num_entries),
        *(order.num_segments, order.order, order.offsets, order.ends, pieces),
    ]


def fields_of(travel: TravelList) -> list[object]:
    return [travel.places, travel.bounds, travel.counts, travel.message_places, travel.message_bounds]


def contents(part: object) -> object:
    return part.tolist() if isinstance(part, Tensor | np.ndarray) else part


def travel_list(counts: list[list[int]]) -> TravelList:
    total = sum(map(sum, counts))
    bounds = [0, *np.repeat(np.cumsum([sum(part_counts) for part_counts in counts]), 2).tolist()]
    return TravelList(torch.arange(total), bounds, np.array(counts, dtype=np.int64))


def test_a_message_by_hand() -> None:
    """Two micro-batches among three ranks; rows of 12, 40 and 4 bytes. Rank 1 sends nothing to itself."""
    counts = [[[1, 0, 3], [0, 0, 0]], [[2, 0, 0], [0, 0, 1]], [[0, 0, 5], [1, 0, 0]]]
    sizes, (first, second, third) = lay_out([travel_list(group_counts) for group_counts in counts], [12, 40, 4])
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
    _, (travel,) = lay_out([travel_list([[3, 0, 2], [0, 0, 1]])], [row_bytes])
    assert (travel.in_message(0) is None) == is_in_order
