"""Ranks wait for a slow rank as long as it makes progress, and name it; ranks that wait for each other are given up.

Fails if Monitor._run writes a heartbeat only once, or if Monitor._warn prints nothing.
"""

import io
import re
import socket
import sys
import time
from collections.abc import Iterator

from nestpipe import Batch, World
from nestpipe.distributed import RankError
from tests.exactness.cases import Case, global_batches, make_trainer, share_of
from tests.ranks import run_fragile_ranks

CASE = Case("adagrad", "pooled_sum", 2, steps=6, schedule="nested")
TIMEOUT_SECONDS, STALL_SECONDS = 1.0, 6.0
SLOW_SECONDS = 1.2
"""More than a tenth of STALL_SECONDS, after which ranks that wait say so."""


def slow(batches: list[Batch]) -> Iterator[Batch]:
    """Takes long for the first batch, which check_split pulls, and for another one."""
    for number, batch in enumerate(batches):
        if number in (0, 4):
            time.sleep(SLOW_SECONDS)
        yield batch


def train_slowly(world: World) -> tuple[int, list[str], str]:
    """Trains with rank 1 slow in its reader, in forward (as if it compiled), in after_step and in a callback. Returns
    the steps, the places, and what the rank has printed."""
    world.watch.timeout_seconds, world.watch.stall_seconds = TIMEOUT_SECONDS, STALL_SECONDS
    sys.stderr = io.StringIO()
    trainer = make_trainer(world, CASE)
    forward, places = trainer.model.forward, []

    def rest(place: str) -> None:
        if world.rank == 1 and place not in places:
            places.append(place)
            time.sleep(SLOW_SECONDS)

    def slow_forward(embeddings, inputs):
        if trainer.num_steps == 2:
            rest("forward")
        return forward(embeddings, inputs)

    def slow_callback(trainer, result) -> bool:
        rest("callback")
        return False

    slow_callback.every = 5
    trainer.model.forward = slow_forward
    batches = share_of(global_batches(CASE.steps), world)
    trainer.fit(
        slow(batches) if world.rank == 1 else batches,
        after_step=lambda result: rest("after_step"),
        callbacks=[slow_callback],
    )
    with world.busy():
        rest("busy")
    world.control.share_text("here")
    return trainer.num_steps, places, sys.stderr.getvalue()


def test_a_slow_rank_is_not_given_up() -> None:
    """Rank 0 prints one line for each wait that takes long, with rank 1's place and host, and since when."""
    results = run_fragile_ranks(2, train_slowly, num_results=2)
    assert [results[rank][:2] for rank in range(2)] == [(6, []), (6, ["after_step", "forward", "callback", "busy"])]
    assert results[1][2] == ""
    time_of = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    waiting = rf"nestpipe: rank 0: [\w ]+, in [\w ]+ since {time_of}: rank 1 is slow "
    slow = rf"\([\w ]+, in ([\w ]+), on host {re.escape(socket.gethostname())}, since {time_of}\)"
    lines = [re.fullmatch(waiting + slow, line) for line in results[0][2].splitlines()]
    assert all(lines), results[0][2]
    places = ["the split check", "after_step", "prefetch", "forward and backward", "callbacks", "long work"]
    assert all(sum(place in line.group(1) for line in lines if line is not None) == 1 for place in places)


def meet_elsewhere(world: World) -> tuple[str, str]:
    """Calls collectives that do not match: each rank waits in another channel."""
    world.watch.timeout_seconds, world.watch.stall_seconds = 3.0, 1.5
    channel = world.control if world.rank == 0 else world.route
    try:
        channel.share_text("here")
    except RankError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_ranks_that_wait_for_each_other() -> None:
    """Fails if Monitor._check_stall looks only at ranks that do not wait."""
    results = run_fragile_ranks(2, meet_elsewhere, num_results=2)
    for rank, (other, place) in enumerate([(1, "at the start, in route"), (0, "at the start, in agreement")]):
        name, text = results[rank]
        assert name == "RankError"
        assert f"rank {other} failed: no progress for " in text
        assert f"it hangs ({place}, on host {socket.gethostname()}, since 2" in text
