"""I9: one order of summation, in both windows: a requester's micro-batches in order, then the requesters by rank.

Fails if _entries_by_slot returns the requesters of a slot in another order (`entries.flip(0)`), or if
LocalBatch._collect replaces the gradients of earlier micro-batches (`is_first | True`).
"""

import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, Jagged, Pooled, Table, Trainer, World, init, optim
from nestpipe.embedding.cluster import GIVEN_ORDER
from tests.exactness.cases import on_ranks
from tests.schedules import OUTER

FACTORS = torch.tensor([1.0, 1e8, -1e8, 3.0, 1e-3, 7e6, -7e6, 1e-6], dtype=torch.float32)
RANK_FACTORS = (1.0, 1e8, -1e8, 3.0)


def factors(rank: int, size: int) -> torch.Tensor:
    """Returns numbers whose sum depends on the order: of micro-batches on one rank, of ranks on several."""
    return FACTORS if size == 1 else torch.tensor([RANK_FACTORS[rank]] + [0.0] * (len(FACTORS) - 1))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, embeddings, inputs) -> Tensor:
        return (inputs["factor"] * embeddings["a"].sum(1)).sum()


def gradient_of_one_key(world: World, schedule: str, window: str) -> list[float]:
    """Trains samples that all have key 5, each in its own micro-batch. Returns the row."""
    table = Table("A", 1, init=init.Constant(0.0), optimizer=optim.SGD(1.0))
    trainer = Trainer(
        Weighted(),
        {"a": Pooled(table)},
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
        world=world,
        schedule=schedule,
        num_micro_batches=len(FACTORS),
        window=window,
        clustering=GIVEN_ORDER,
        check_split=False,
    )
    keys, inputs = Jagged.one_each(torch.full((8,), 5)), {"factor": factors(world.rank, world.size)}
    trainer.fit([Batch({"a": keys}, inputs, weight=1.0 / world.size)])
    return trainer.store.export_piece("A", 0, 65536).records.flatten().tolist()


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("window", ["once", "resend"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_order(schedule: str, window: str, size: int) -> None:
    total = torch.zeros(())
    for rank in range(size):
        rank_total = torch.zeros(())
        for factor in factors(rank, size):
            rank_total = rank_total + factor
        total = total + rank_total
    stored = [row for rows in on_ranks(size, gradient_of_one_key, schedule, window) for row in rows]
    assert stored == [-float(total)]
