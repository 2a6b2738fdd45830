"""Fills a row pool before a measurement."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed import Notice
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.group import group_features
from nestpipe.embedding.resident import Growth
from nestpipe.embedding.route import route_alone
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.train.trainer import Trainer


def preload(trainer: Trainer, num_slots: Sequence[int], keys: Iterable[Mapping[str, Tensor]]) -> None:
    """Gives the trainer a pool with so many slots for each table group, in which these keys are resident.

    keys: distinct keys of each feature, piece after piece, those that are used last at the end.
    """
    pool = Pipeline(trainer.features, [], store=trainer.store, world=trainer.world, **vars(trainer.options)).pool
    assert pool is not None
    pool.open(trainer.store)
    pool.grow(Growth(tuple(num_slots), 0))
    groups = group_features(trainer.features)
    for piece in keys:
        lists = {name: Jagged(values, torch.tensor([0, len(values)])) for name, values in piece.items()}
        route = route_alone(dedup_batch(groups, Batch(lists), 1, 1, trainer.options.num_threads), Notice())
        assert route is not None
        pool.settle(pool.retrieve(route.owner_dedups), None)
    trainer.pool = pool
