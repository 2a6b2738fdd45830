"""The header of a route carries each rank's notice, and every rank reads the same from all headers.

Fails, for example, if _Agreed.is_stop_requested looks only at the ranks with a batch, if _Agreed.num_saves_written is
the largest number instead of the smallest, or if _Header.encode leaves the notice out for a rank without data.
"""

from dataclasses import dataclass
from typing import NoReturn

import pytest
import torch

from nestpipe import Batch, Jagged, Pooled, Table
from nestpipe.distributed import Channel, Notice
from nestpipe.embedding.cluster import GIVEN_ORDER
from nestpipe.embedding.dedup import BatchDedup, dedup_batch
from nestpipe.embedding.exchange import make_exchange
from nestpipe.embedding.group import group_features
from nestpipe.embedding.host_memory import HostMemory
from nestpipe.embedding.route import Route, route_alone, route_keys
from tests.embedding.thread_ranks import on_threads

FEATURES = group_features({"items": Pooled(Table("item", 4)), "tags": Pooled(Table("tag", 2))})


def batch_of(rank: int, size: int, has_batch: bool = True, weight: float = 1.5) -> BatchDedup:
    keys = {name: Jagged.one_each(torch.arange(3) + rank) for name in FEATURES.features}
    batch = Batch(keys, weight={"click": weight, "like": 2 * weight}) if has_batch else None
    return dedup_batch(FEATURES, batch, 1, size, 1, GIVEN_ORDER)


def routed(channel: Channel, notices: list[Notice], without_data: int | None) -> Route | None:
    batch = batch_of(channel.rank, channel.size, channel.rank != without_data)
    return route_keys(batch, FEATURES, channel, notices[channel.rank])


@pytest.mark.parametrize("without_data", [None, 0, 2])
@pytest.mark.parametrize("asking", [None, 0, 2])
def test_every_rank_reads_the_same(asking: int | None, without_data: int | None) -> None:
    """A rank without data tells its notice like any other, and weights do not change by it."""
    notices = [Notice(is_stop_requested=rank == asking, num_saves_written=7 - rank) for rank in range(3)]
    routes = on_threads(3, routed, notices, without_data)
    num_batches = 3 - (without_data is not None)
    for rank, route in enumerate(routes):
        assert route.is_stop_requested == (asking is not None)
        assert route.num_saves_written == 5
        if rank != without_data:
            assert route.weights == {"click": 1.5 * num_batches, "like": 3.0 * num_batches}


@dataclass
class CountedNotice(Notice):
    """Asks to stop from its second reading on."""

    num_reads: int = 0

    def __getattribute__(self, name: str) -> object:
        if name == "is_stop_requested":
            self.num_reads += 1
            return self.num_reads > 1
        return super().__getattribute__(name)


def test_a_notice_is_read_once_for_each_batch() -> None:
    """Otherwise the rank that asks could stop one batch before the others. Fails if route_keys takes its own rank's
    value from the notice and not from the header."""
    notices = [CountedNotice(), CountedNotice()]
    for expected in (False, True):
        assert [route.is_stop_requested for route in on_threads(2, routed, notices, None)] == [expected] * 2


def test_the_largest_number_of_saves() -> None:
    """Fails if the header has 32 bits for it."""
    routes = on_threads(2, routed, [Notice(num_saves_written=2**40), Notice(num_saves_written=2**40 + 1)], None)
    assert [route.num_saves_written for route in routes] == [2**40] * 2


def test_a_world_of_one() -> None:
    """Fails if route_alone returns a Route with constant fields."""
    notice = Notice(is_stop_requested=True, num_saves_written=3)
    route = route_alone(batch_of(0, 1), notice)
    assert route is not None
    assert (route.is_stop_requested, route.num_saves_written) == (True, 3)
    assert route_alone(batch_of(0, 1, has_batch=False), notice) is None


def with_an_error(channel: Channel, notices: list[Notice]) -> str:
    batch = ValueError("no such key") if channel.rank == 1 else batch_of(channel.rank, channel.size)

    def raise_agreed(own: Exception | None, failed: list[int]) -> NoReturn:
        raise own or RuntimeError(f"ranks {failed} failed")

    channel.raise_agreed = raise_agreed
    try:
        make_exchange(channel, channel, channel, HostMemory()).route(batch, FEATURES, notices[channel.rank])
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


def test_an_error_comes_before_a_notice() -> None:
    """Fails if _Header.encode writes the notice where has_error belongs."""
    assert on_threads(2, with_an_error, [Notice(True, 1), Notice(True, 1)]) == ["ranks [1] failed", "no such key"]
