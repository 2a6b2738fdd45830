"""X1 and X2: requesters and owners plan alike what crosses the batch boundary, and it arrives."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.distributed import Channel
from nestpipe.embedding.exchange.distributed import DistributedExchange
from nestpipe.embedding.host_memory import HostMemory
from tests.embedding.planned_ranks import (
    FEATURES,
    WINDOWS,
    Rank,
    World,
    check_ranks,
    check_sums_of,
    routed,
    worlds,
)
from tests.embedding.thread_ranks import on_threads


@dataclass(frozen=True)
class Pair:
    """Two consecutive batches of each rank."""

    earlier: World
    later: World

    @property
    def size(self) -> int:
        return self.earlier.size


def crossed(channel: Channel, pair: Pair, window: str) -> tuple[Rank, Rank] | None:
    """Returns both batches, the earlier one with its late gradients and the later one with its early rows."""
    earlier, later = routed(channel, pair.earlier), routed(channel, pair.later)
    if earlier is None or later is None:
        return None
    memory = HostMemory()
    exchange = DistributedExchange(channel, channel, channel, memory)
    crossing = exchange.compare(earlier, later, True, 1)
    plans = exchange.plan(earlier, window), exchange.plan(later, window, crossing.early)
    assert plans[0] is not None
    assert plans[1] is not None
    plans[0].returns = exchange.plan_returns(earlier, window, crossing.late)
    return Rank(channel.rank, earlier, plans[0]), Rank(channel.rank, later, plans[1])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), world=worlds(), window=st.sampled_from(WINDOWS))
def test_early_rows_and_late_gradients(data: st.DataObject, world: World, window: str) -> None:
    """X1, X2. Fails if _owned_marks marks a key of both batches, if with_early_part keeps the first micro-batch of an
    early key in window "resend", or if with_late_part puts the late part before the last micro-batch."""
    others = data.draw(st.lists(worlds(), min_size=1, max_size=1).map(lambda drawn: drawn[0].batches))
    batches = [others[r % len(others)] for r in range(world.size)]
    pairs = on_threads(world.size, crossed, Pair(world, World(batches, world.num_micro_batches)), window)
    ranks = [pair for pair in pairs if pair is not None]
    if not ranks:
        return
    earlier, later = [pair[0] for pair in ranks], [pair[1] for pair in ranks]
    groups = range(len(FEATURES.groups))
    before, after = ({key for rank in side for g in groups for key in rank.slots(g)} for side in (earlier, later))
    frozen = {key for key in before if any(group.frozen and key[0] in group.names for group in FEATURES.groups)}
    check_ranks(earlier, window, set(), late=before - after - frozen)
    check_ranks(later, window, early=after - before, late=set())


@settings(max_examples=20, deadline=None)
@given(world=worlds(), other=worlds(), window=st.sampled_from(WINDOWS))
def test_rows_and_gradients_arrive_across_batches(world: World, other: World, window: str) -> None:
    """The same with early rows and late gradients. Fails if Requester.arriving takes new memory after the early rows,
    if _by_position returns the gradient of the last micro-batch alone, or if return_gradients keeps its first array."""
    batches = [other.batches[r % other.size] for r in range(world.size)]
    check_sums_of(world, window, World(batches, world.num_micro_batches))
