"""A model saved by several ranks scores in one process, to the bit.

Fails, for example, if read_whole reads the rows of rank 0 only, or makes its store with another seed.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import nestpipe
from nestpipe import World
from nestpipe.checkpoint import CheckpointError, find_checkpoint
from nestpipe.embedding.read import read_batch
from tests.checkpoint.saved import DENSE, SHARD, flip
from tests.clicks import DATA, batches, features, make_trainer, model
from tests.ranks import run_ranks

UNSEEN = 10_000


def train_and_save(world: World, path: Path) -> Tensor:
    """Returns predictions from the trainer's own rows, for a batch half of whose keys were never trained."""
    trainer = make_trainer(world)
    trainer.fit(batches(world), steps=4)
    trainer.save(path)
    trainer.model.eval()
    reading = read_batch(trainer.features, DATA.samples(UNSEEN, 40), trainer.store, world.evaluate)
    with torch.no_grad():
        (prediction,) = (trainer.model.predict(part.embeddings, part.inputs) for part in reading)
    return prediction


@pytest.mark.parametrize("size", [1, 3])
def test_scores_as_the_trainer_would(size: int, tmp_path: Path) -> None:
    path = tmp_path / "save"
    predictions = [train_and_save(World(), path)] if size == 1 else run_ranks(size, train_and_save, path)
    scorer = nestpipe.evaluation.Scorer(model(), features(), path)
    assert not dist.is_initialized()
    scores = scorer(DATA.samples(UNSEEN, 40))
    assert all(torch.equal(scores, prediction) for prediction in predictions)
    assert scorer.store.size("c10") > 0
    assert len(scorer(DATA.samples(0, 0))) == 0


def test_refuses_what_does_not_fit(tmp_path: Path) -> None:
    train_and_save(World(), tmp_path / "save")
    other = {**features(), "c00": nestpipe.Pooled(nestpipe.Table("c00", 4))}
    with pytest.raises(CheckpointError, match="table 'c00': "):
        nestpipe.evaluation.Scorer(model(), other, tmp_path / "save")
    with pytest.raises(ValueError, match="Linear has no method predict"):
        nestpipe.evaluation.Scorer(nn.Linear(1, 1), features(), tmp_path / "save")
    saved = find_checkpoint(tmp_path / "save")
    for name, text in ((SHARD, "its checksum is wrong"), (DENSE, "its checksum is not that of the manifest")):
        flip(saved / name, 200)
        with pytest.raises(CheckpointError, match=text):
            nestpipe.evaluation.Scorer(model(), features(), tmp_path / "save")
        flip(saved / name, 200)
    nestpipe.evaluation.Scorer(model(), features(), tmp_path / "save")
