"""I6: the owner dedups again, per table: no gradient of a key with two requesters is lost, and (A, 5) is not (B, 5).

Tables are in one group, or in two. Fails if _exchange_keys dedups all tables of a group together
(`counts[g].sum(1, keepdim=True)`), or if _entries_by_slot keeps one requester's entries only (`offsets.clamp(max=1)`).
"""

import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, Jagged, Pooled, Table, Trainer, World, init, optim
from tests.exactness.cases import on_ranks
from tests.schedules import OUTER


class Weighted(nn.Module):
    """The gradient of a row is the sum of its samples' factors."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, embeddings, inputs) -> Tensor:
        return (inputs["factor"] * embeddings["a"].sum(1) + 10 * inputs["factor"] * embeddings["b"].sum(1)).sum()


def train_shared_key(world: World, schedule: str, dim: int) -> dict[str, list[tuple[int, list[float]]]]:
    """Trains key 5 of both tables on every rank: on rank r in r + 1 samples with factor 1, in two micro-batches."""
    options = {"init": init.Constant(0.0), "optimizer": optim.SGD(1.0), "dtype": torch.float64}
    features = {"a": Pooled(Table("A", 2, **options)), "b": Pooled(Table("B", dim, **options))}
    trainer = Trainer(
        Weighted(),
        features,
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.1),
        world=world,
        schedule=schedule,
        num_micro_batches=2,
    )
    count = world.rank + 1
    keys = Jagged.one_each(torch.full((count,), 5))
    factor = torch.ones(count, dtype=torch.float64)
    trainer.fit([Batch({"a": keys, "b": keys}, {"factor": factor}, weight=0.5 * count)])
    pieces = {name: trainer.store.export_piece(name, 0, 65536) for name in ("A", "B")}
    return {name: list(zip(p.keys.tolist(), p.records.tolist(), strict=True)) for name, p in pieces.items()}


def train_grouped_or_not(world: World, schedule: str) -> list[dict[str, list[tuple[int, list[float]]]]]:
    """Trains with tables of equal dim, which are one group, and of different dims."""
    return [train_shared_key(world, schedule, dim) for dim in (2, 3)]


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_key_of_all_ranks_in_two_tables(schedule: str, size: int) -> None:
    results = on_ranks(size, train_grouped_or_not, schedule)
    num_samples = size * (size + 1) // 2
    gradient = num_samples / (0.5 * num_samples)  # I7: divided by the global weight
    for number, dim in enumerate((2, 3)):
        assert [row for result in results for row in result[number]["A"]] == [(5, [-gradient] * 2)]
        assert [row for result in results for row in result[number]["B"]] == [(5, [-10 * gradient] * dim)]
