"""Trains HSTU and FuXi: the Trainer accepts them in micro-batches, digests are reproducible, and the loss falls.

Fails, for example, if the loss is divided by the number of positions (check_split refuses it), or if the negatives of a
sample are drawn from the default generator.
"""

import pytest
import torch

import nestpipe
from nestpipe import Batch
from nestpipe.data.dataset import Batches, Dataset
from nestpipe.data.negatives import WithNegatives
from nestpipe.embedding import optim
from nestpipe.models import HSTU, FuXi
from tests.histories import NUM_ITEMS, features, histories

MAX_LENGTH = 6
DIM = 8


class Histories(Dataset):
    """Histories of consecutive items, so that there is something to learn."""

    num_samples = None

    def samples(self, first: int, count: int) -> Batch:
        positions = torch.arange(first, first + count)
        drawn = histories((positions * 5 % (MAX_LENGTH + 1)).tolist(), MAX_LENGTH, seed=0)
        history, target = drawn.keys["history"], drawn.keys["target"]
        starts = positions * 7
        where = torch.arange(len(history.values)) - history.offsets[:-1].repeat_interleave(history.lengths)
        history.values.copy_((starts.repeat_interleave(history.lengths) + where) % NUM_ITEMS)
        target.values.copy_((starts + history.lengths) % NUM_ITEMS)
        return Batch({"history": history, "target": target}, drawn.inputs, drawn.weight)


def train(model_class, per: str, steps: int, num_micro_batches: int, schedule: str = "serial", dropout: float = 0.2):
    torch.use_deterministic_algorithms(True)
    try:
        table = nestpipe.Table("item", DIM, optimizer=optim.Adam(0.01, betas=(0.9, 0.98)))
        trainer = nestpipe.Trainer(
            model_class(DIM, MAX_LENGTH, dim_qk=4, dim_v=4, num_heads=2, dropout=dropout, negatives_per=per, seed=4),
            features(table),
            dense_optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01, betas=(0.9, 0.98), weight_decay=0),
            schedule=schedule,
            num_micro_batches=num_micro_batches,
        )
        data = WithNegatives(Histories(), NUM_ITEMS, 8, per)
        result = trainer.fit(Batches(data, 24), steps=steps)
        return trainer.digest(), result.losses
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("per", ["position", "sample"])
@pytest.mark.parametrize("model_class", [HSTU, FuXi])
def test_accepted_in_micro_batches_and_the_same_again(model_class, per: str) -> None:
    digest, losses = train(model_class, per, steps=2, num_micro_batches=3)
    assert len(losses) == 2
    assert train(model_class, per, steps=2, num_micro_batches=3, schedule="inter") == (digest, losses)
    undropped = [train(model_class, per, 2, parts, dropout=0.0)[1] for parts in (1, 3)]
    assert undropped[0] == pytest.approx(undropped[1], rel=1e-5)


@pytest.mark.parametrize("model_class", [HSTU, FuXi])
def test_learns(model_class) -> None:
    _, losses = train(model_class, "position", steps=60, num_micro_batches=2)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
