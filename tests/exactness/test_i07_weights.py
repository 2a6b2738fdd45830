"""I7: the global weight, known before the first forward, divides each sum; gradients are summed over ranks.

Fails if route_keys returns this rank's weights, or if DenseReducer divides by the number of ranks.
"""

from dataclasses import replace

import pytest
import torch

from nestpipe import World
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of
from tests.schedules import OUTER

CASE = Case("sgd", "pooled_mean", 3, steps=6)


def train_weighted(world: World, schedule: str) -> tuple[list[float], torch.Tensor]:
    """Trains with weight 2.5 for each sample. In step 3 only the first rank has a weight."""
    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    batches = share_of(global_batches(CASE.steps), world)
    weighted = [replace(batch, weight=2.5 * len(batch)) for batch in batches]
    weighted[3] = replace(weighted[3], weight=60.0 if world.rank == 0 else 0.0)
    result = trainer.fit(weighted)
    return result.losses, trainer.model.first.detach().clone()


@pytest.mark.parametrize("schedule", OUTER)
@pytest.mark.parametrize("size", [2, 3])
def test_weights_are_global(schedule: str, size: int) -> None:
    ((losses, first),) = on_ranks(1, train_weighted, "serial")
    for got, parameter in on_ranks(size, train_weighted, schedule):
        assert got == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(parameter, first, rtol=1e-10, atol=1e-12)


def several_losses(world: World, schedule: str) -> list[float]:
    trainer = make_trainer(world, replace(CASE, schedule=schedule))
    forward = trainer.model.forward

    def two_losses(embeddings, inputs):
        loss = forward(embeddings, inputs)
        return {"click": loss, "buy": loss * 3}

    trainer.model.forward = two_losses
    batches = share_of(global_batches(CASE.steps), world)
    return trainer.fit([replace(b, weight={"buy": 3.0 * len(b), "click": float(len(b))}) for b in batches]).losses


@pytest.mark.parametrize("schedule", OUTER)
def test_each_loss_has_its_weight(schedule: str) -> None:
    plain = make_trainer(World(), CASE).fit(global_batches(1)).losses
    for losses in on_ranks(2, several_losses, schedule):
        assert losses[0] == pytest.approx(2 * plain[0], rel=1e-10)
