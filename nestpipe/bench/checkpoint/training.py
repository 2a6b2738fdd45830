"""The training of `bench checkpoint`: one table that is large, and a dense part of some tens of milliseconds."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.bench.harness.keys import zipf_ranks
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.optim import Adagrad
from nestpipe.embedding.table import Feature, Pooled, Table
from nestpipe.train.trainer import Trainer

SEED = 1
TABLE, SCHEDULE = "item", "nested"
FILL_ROWS = 100_000
"""Rows that are written at a time."""


@dataclass(frozen=True)
class Size:
    num_rows: int = 4_000_000
    dim: int = 64
    batch_size: int = 512
    keys_per_sample: int = 20
    hidden: int = 1024
    num_batches: int = 64
    num_pairs: int = 5
    num_saves: int = 5
    steps_between_saves: int = 40
    counted_between: int = 15
    """Steps before the next save that count as steps without one. Before them, older checkpoints are removed."""


QUICK = Size(
    num_rows=40_000, batch_size=64, hidden=64, num_batches=8, num_pairs=2, num_saves=2, steps_between_saves=8,
    counted_between=4,
)  # fmt: skip


class Model(nn.Module):
    """Layers on the pooled embedding. Returns the loss sum of a batch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        hidden = size.hidden
        self.layers = nn.Sequential(
            *(nn.Linear(size.dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        )

    def forward(self, embeddings: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        logits = self.layers(embeddings[TABLE]).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, inputs["label"], reduction="sum")


def make_trainer(size: Size) -> Trainer:
    """Makes a trainer with an empty table."""
    features: dict[str, Feature] = {TABLE: Pooled(Table(TABLE, size.dim, optimizer=Adagrad(0.01)))}
    return Trainer(
        Model(size),
        features,
        dense_optimizer=lambda parameters: torch.optim.Adagrad(parameters, 0.01),
        check_split=False,
        schedule=SCHEDULE,
        num_micro_batches=2,
        num_threads=1,
        seed=SEED,
    )


def fill(trainer: Trainer, size: Size) -> None:
    """Writes all rows, with row state as after some training."""
    generator = torch.Generator().manual_seed(SEED)
    trainer.store.reserve(TABLE, size.num_rows)
    for first in range(0, size.num_rows, FILL_ROWS):
        keys = keys_of(torch.arange(first, min(first + FILL_ROWS, size.num_rows)))
        records = torch.rand(len(keys), 2 * size.dim, generator=generator)
        trainer.store.scatter(TABLE, keys, records, step=0)


def keys_of(numbers: Tensor) -> Tensor:
    """Returns the keys of the numbers 0 .. num_rows - 1: all over the range of integers, distinct."""
    return numbers * 6_364_136_223_846_793_005 + SEED  # odd, so no two numbers have the same product


def zipf_batches(size: Size) -> Iterator[Batch]:
    """Returns endless batches of Zipf-distributed keys. Which row is frequent has nothing to do with its place."""
    generator = np.random.default_rng(SEED)
    shape = size.batch_size * size.keys_per_sample
    order = generator.permutation(size.num_rows)
    drawn = [order[zipf_ranks(size.num_rows, shape, generator)] for _ in range(size.num_batches)]
    return itertools.cycle([_batch(torch.from_numpy(numbers), size) for numbers in drawn])


def touching_batches(size: Size, share: float) -> list[Batch]:
    """Returns batches whose keys are a share of all, each once."""
    numbers = torch.randperm(size.num_rows, generator=torch.Generator().manual_seed(SEED))
    num_samples = round(share * size.num_rows / size.keys_per_sample)
    chosen = numbers[: num_samples * size.keys_per_sample]
    return [_batch(part, size) for part in chosen.split(size.batch_size * size.keys_per_sample)]


def _batch(numbers: Tensor, size: Size) -> Batch:
    num_samples = len(numbers) // size.keys_per_sample
    offsets = torch.arange(num_samples + 1) * size.keys_per_sample
    label = (torch.arange(num_samples) % 2).float()
    return Batch({TABLE: Jagged(keys_of(numbers), offsets)}, {"label": label})


def identity(size: Size) -> Record:
    """Returns the fields that say what was measured."""
    return {
        "rows": size.num_rows,
        "dim": size.dim,
        "optimizer": "adagrad",
        "ranks": 1,
        "threads": 1,
        "schedule": SCHEDULE,
        "batch_size": size.batch_size,
        "seed": SEED,
    }
