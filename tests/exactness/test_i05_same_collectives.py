"""I5: all ranks issue the same collectives in the same order, whatever data they have.

Fails if DistributedBatch.send_rows returns early on a rank that neither sends nor receives rows.
"""

import pytest

from nestpipe import World
from tests.collectives import record_collectives
from tests.exactness.cases import Case, global_batches, make_trainer
from tests.ranks import run_ranks
from tests.schedules import OUTER


def collectives(world: World, schedule: str) -> dict[str, list[str]]:
    """Returns the kinds of collectives by channel, in order. Rank 0 has few samples, rank 1 none, rank 2 ends early."""
    calls: dict[str, list[str]] = {}
    record_collectives(world, lambda channel, kind: calls.setdefault(channel, []).append(kind))
    trainer = make_trainer(world, Case("adam", "shared", 4, schedule=schedule))
    batches = global_batches(6)
    mine = {0: [batch[:2] for batch in batches], 1: [], 2: batches[:3]}[world.rank]
    trainer.fit(mine)
    return calls


@pytest.mark.parametrize("schedule", OUTER)
def test_same_order_on_every_rank(schedule: str) -> None:
    first, *others = run_ranks(3, collectives, schedule)
    early = 5 if schedule == "nested" else 0  # the first batch has no early rows, the last one no late gradients
    assert len(first["row exchange"]) == 6 * 4 + early
    assert len(first["gradient return"]) == 6 * 4 + early
    assert len(first["commit"]) == 6
    assert all(calls == first for calls in others)
