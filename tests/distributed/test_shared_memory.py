"""Collectives through the memory that the ranks of a host share."""

import os
import time

import pytest
import torch
from torch import Tensor

from nestpipe import World
from nestpipe.distributed import RankError, shared_memory
from nestpipe.distributed.shared_memory import LARGE_RING_BYTES, SMALL_SUM_BYTES, SharedMemoryTransport
from nestpipe.distributed.transport import GlooTransport
from tests.exactness.cases import Case
from tests.exactness.test_e1_bit_identical import STREAMS, train_stream
from tests.ranks import run_fragile_ranks, run_ranks

SIZES = (0, 1, 1000, LARGE_RING_BYTES - 1, 2 * LARGE_RING_BYTES + 7)


def part(exchange: int, sender: int, receiver: int) -> Tensor:
    size = SIZES[(exchange + 2 * sender + 3 * receiver) % len(SIZES)]
    return torch.arange(size).add(7 * exchange + 31 * sender + 57 * receiver).to(torch.uint8)


def exchange(world: World) -> list[bool]:
    """Returns, for several exchanges, whether everything has arrived as it was sent."""
    assert isinstance(world.rows.transport, SharedMemoryTransport)
    arrived = []
    for number in range(2 * len(SIZES)):
        sent = [part(number, world.rank, r) for r in range(world.size)]
        expected = [part(number, r, world.rank) for r in range(world.size)]
        received = torch.empty(sum(map(len, expected)), dtype=torch.uint8)
        sizes = [len(p) for p in sent], [len(p) for p in expected]
        world.rows.all_to_all(
            torch.cat(sent), sizes[0], received, sizes[1], lambda n=number: time.sleep(0.002 * (n % 3))
        )
        arrived.append(torch.equal(received, torch.cat(expected)))
    return arrived


@pytest.mark.parametrize("size", [2, 4])
def test_messages_of_any_size(size: int) -> None:
    """Fails if begin_all_to_all leaves out the rank's own part."""
    assert run_ranks(size, exchange) == [[True] * 2 * len(SIZES)] * size


def values_of(rank: int, number: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(number, generator=generator, dtype=torch.float64).mul(10).to(dtype)


def add_up(world: World) -> list[bool]:
    """Returns whether sums have the bits of a sum in order of rank: whole or a part at a time, at once or begun."""
    numbers = (0, 1, 5, SMALL_SUM_BYTES // 8, SMALL_SUM_BYTES // 4 + 1, 1_000_003)
    equal = []
    for number in numbers:
        for dtype in (torch.float32, torch.float64, torch.int64):
            values = [values_of(rank, number, dtype) for rank in range(world.size)]
            total = values[0].clone()
            for one in values[1:]:
                total += one
            begun = world.dense.begin_sum([values[world.rank].clone()])
            world.control.all_reduce_sum(values[world.rank])
            equal += [torch.equal(values[world.rank], total), torch.equal(world.watch.wait(begun, "sum")[0], total)]
    return equal


@pytest.mark.parametrize("size", [2, 3])
def test_sums_in_order_of_rank(size: int) -> None:
    """Fails if a rank begins a sum with its own part."""
    results = run_ranks(size, add_up)
    assert all(all(equal) for equal in results)
    assert len(results[0]) == 36


def train_both_ways(world: World) -> list[tuple[str, str]]:
    gloo = World(world.rank, world.size, shared_memory=False)
    assert isinstance(gloo.rows.transport, GlooTransport)
    case = Case("adam", "shared", 2, schedule="nested")
    return [(train_stream(world, s, case)[0], train_stream(gloo, s, case)[0]) for s in list(STREAMS)[:3]]


def test_same_digests_as_gloo() -> None:
    """Of two ranks; the sums of more have other bits. Fails if `gather` puts a part in another rank's place."""
    for results in run_ranks(2, train_both_ways):
        assert all(shared == gloo for shared, gloo in results)


def on_other_hosts(world: World) -> tuple[bool, int]:
    name = f"host {world.rank // 2}"
    shared_memory.host_identity = lambda: name
    other = World(world.rank, world.size)
    values = torch.ones(1)
    other.control.all_reduce_sum(values)
    return isinstance(other.control.transport, GlooTransport), int(values)


def test_ranks_of_several_hosts_use_gloo() -> None:
    assert run_ranks(3, on_other_hosts) == [(True, 3)] * 3


def leave(world: World) -> str:
    """Rank 0 sends the others a number. Rank 1 dies before it sends its own."""
    world.watch.timeout_seconds = 3.0  # the shorter, the sooner two heartbeats show who is dead
    if world.rank == 1:
        os._exit(3)
    parts = torch.full((world.size, 1), world.rank)
    with pytest.raises(RankError) as error:
        world.control.all_to_all_equal(parts)
    return str(error.value)


@pytest.mark.alone
def test_a_rank_that_dies() -> None:
    """Fails if `advance` does not look for closed connections: the ranks then wait for the rank's next heartbeat."""
    begun = time.monotonic()
    texts = run_fragile_ranks(3, leave, num_results=2)
    assert all("rank 1 failed: its connection was closed, it has died" in text for text in texts.values())
    assert time.monotonic() - begun < 15


def send_and_leave(world: World) -> int:
    """Rank 1 sends its number and ends at once; rank 0 is late."""
    parts, received = torch.full((2,), 7, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    if world.rank == 1:
        world.rows.all_to_all(parts[:1], [1, 0], received[:0], [0, 0])
        os._exit(0)
    time.sleep(0.5)
    world.rows.all_to_all(parts[:0], [0, 0], received, [0, 1])
    return int(received)


@pytest.mark.alone
def test_what_a_rank_sent_before_it_left() -> None:
    """Fails if `advance` looks for closed connections before it looks for the message."""
    assert run_fragile_ranks(2, send_and_leave, num_results=1) == {0: 7}


def leave_early(world: World) -> list[bool]:
    """The last rank ends its process as soon as it has everything; the others still wait for each other."""
    last = world.size - 1
    sizes = [1000] * world.size
    received = torch.empty(1000 * world.size, dtype=torch.uint8)
    message = torch.full((1000 * world.size,), world.rank, dtype=torch.uint8)
    if world.rank == 0:  # the last rank needs nothing of rank 0
        time.sleep(1.0)
    sent = [0 if (world.rank, r) == (0, last) else size for r, size in enumerate(sizes)]
    arriving = [0 if (r, world.rank) == (0, last) else size for r, size in enumerate(sizes)]
    world.rows.all_to_all(message[: sum(sent)], sent, received[: sum(arriving)], arriving)
    return [world.rank == last or bool((received[:1000] == 0).all())]


def test_a_rank_may_leave_before_others_are_done() -> None:
    """Fails if _Exchange.advance raises for a rank that has sent everything."""
    assert run_ranks(3, leave_early) == [[True]] * 3
