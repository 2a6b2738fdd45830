"""A small DLRM on a small synthetic click log, for tests of the code around a step."""

from typing import Any

import torch

import nestpipe
from nestpipe import World
from nestpipe.data.dataset import Batches
from nestpipe.data.synthetic.clicks import NUM_DENSE, ClickData
from nestpipe.models import DLRM

DIM = 8
DATA = ClickData(seed=1, scale=0.001)


def features() -> dict[str, nestpipe.Pooled]:
    optimizer = nestpipe.optim.Adagrad(lr=0.1)
    return {name: nestpipe.Pooled(nestpipe.Table(name, DIM, optimizer=optimizer)) for name in DATA.feature_names}


def model() -> DLRM:
    return DLRM(NUM_DENSE, DATA.feature_names, DIM, bottom=(16,), top=(32,), seed=3)


def make_trainer(world: World, **options: Any) -> nestpipe.Trainer:
    def dense_optimizer(parameters):
        return torch.optim.Adam(parameters, 3e-3)

    return nestpipe.Trainer(model(), features(), dense_optimizer=dense_optimizer, world=world, seed=5, **options)


def batches(world: World, batch_size: int = 64, position: int = 0) -> Batches:
    """Returns the batches of this rank. batch_size: samples of the global batch."""
    result = Batches(DATA, batch_size // world.size, world.rank, world.size)
    result.load_state({"position": position})
    return result
