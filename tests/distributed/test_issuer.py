"""One thread issues all collectives of rows and dense gradients, in the same order on every rank. gloo does not need
it; here it is forced, with host memory in place of device memory.

Fails if Executor._lane gives stages that exchange rows their own threads: return_gradients then overtakes a slow
send_rows. Fails if DenseReducer.overlap begins buckets in the last backward: a rank without samples in the last
micro-batches is then early.
"""

import threading
import time
from dataclasses import replace

import pytest

from nestpipe import World
from nestpipe.distributed import Channel
from nestpipe.embedding.exchange.distributed import DistributedBatch
from nestpipe.pipelining.schedule import SCHEDULES
from tests.exactness.cases import Case, global_batches, make_trainer
from tests.exactness.test_e1_bit_identical import STREAMS, train_stream
from tests.ranks import run_ranks
from tests.schedules import OUTER

SOME = ["all_equal", "period_2", "empty_batches", "ragged_end", "one_rank_empty"]


def with_issuer(world: World, has_issuer: bool = True) -> World:
    """Returns a world that exchanges through gloo, whose dense sums have other bits than those in shared memory."""
    options = {"has_issuer": has_issuer, "shared_memory": False}
    return World(world.rank, world.size, world.watch.timeout_seconds, world.device, **options)


def train_streams(world: World, schedules: list[str]) -> list[list[str]]:
    """Returns, for each stream, the digests of serial with a thread per channel and of schedules with an issuer."""
    digests, issuing, world = [], with_issuer(world), with_issuer(world, has_issuer=False)
    for number, stream in enumerate(STREAMS if len(schedules) > 1 else SOME):
        case = Case("adam", "shared", (2, 5)[number % 2], window=("once", "resend")[number % 2])
        runs = [(world, case), *((issuing, replace(case, schedule=schedule)) for schedule in schedules)]
        digests.append([train_stream(run_world, stream, run)[0] for run_world, run in runs])
    return digests


@pytest.mark.parametrize("schedules", [["nested"], pytest.param([*SCHEDULES], marks=pytest.mark.slow)], ids=str)
def test_same_digests(schedules: list[str]) -> None:
    first, *others = run_ranks(3, train_streams, schedules)
    assert len(first) >= len(SOME)
    assert all(other == first for other in others)
    assert [len(set(digests)) for digests in first] == [1] * len(first)


def issued(world: World, schedule: str) -> list[tuple[str, str]]:
    """Returns thread and channel of each collective that the issuer issues, in order. Rank 0 has samples only in the
    first two micro-batches, rank 1 has none, rank 2 has samples in all; send_rows takes longer on rank 2."""
    order: list[tuple[str, str]] = []
    guarded, send_rows = Channel._guarded, DistributedBatch.send_rows

    def record(channel: Channel, collective):
        if channel.name in ("row exchange", "gradient return", "dense reduction"):
            order.append((threading.current_thread().name, channel.name))
        return guarded(channel, collective)

    def send_late(batch: DistributedBatch, micro_batch: int) -> None:
        time.sleep(0.005 * (world.rank == 2 and micro_batch > 0))
        send_rows(batch, micro_batch)

    Channel._guarded, DistributedBatch.send_rows = record, send_late
    trainer = make_trainer(with_issuer(world), Case("adam", "shared", 4, schedule=schedule))
    batches = global_batches(5)
    trainer.fit({0: [batch[:2] for batch in batches], 1: [], 2: batches}[world.rank])
    return order


@pytest.mark.parametrize("schedule", OUTER)
def test_same_order_from_one_thread(schedule: str) -> None:
    first, *others = run_ranks(3, issued, schedule)
    assert {thread for thread, _ in first} == {"nestpipe-issuer"}
    late = 4 if schedule == "nested" else 0  # the last batch has no late gradients
    assert [name for _, name in first].count("gradient return") == 5 * 4 + late
    assert all(other == first for other in others)


def clipped(world: World) -> str:
    trainer = make_trainer(world, Case("adagrad", "shared", 2, schedule="nested"))
    trainer.clip_norm, trainer.clip_rows = 0.1, True
    trainer.fit(global_batches(3))
    return trainer.digest()


def clip_both_ways(world: World) -> tuple[str, str]:
    return clipped(with_issuer(world, has_issuer=False)), clipped(with_issuer(world))


def test_a_sum_that_the_caller_waits_for() -> None:
    """Clipping sums a norm on the compute lane."""
    (first, second), others = run_ranks(2, clip_both_ways)
    assert first == second == others[0] == others[1]
