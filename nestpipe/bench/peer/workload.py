"""What both systems train: tables, batches, initial rows and the dense model. Needs torch and numpy only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nestpipe.bench.harness.keys import zipf_ranks

SEED = 1
LEARNING_RATE = 0.01
EPSILON = 1e-8
"""Added to the root in row-wise Adagrad."""
ROWS_AT_A_TIME = 100_000


@dataclass(frozen=True)
class Workload:
    name: str
    num_tables: int
    num_rows: int
    """Rows of a table."""
    keys_per_feature: int
    batch_size: int
    """Samples of a rank."""
    is_pooled: bool
    """True if the rows of a feature are added up for each sample; otherwise the model gets each of them."""
    dim: int = 64
    hidden: int = 256
    num_batches: int = 16
    """Distinct batches, which are repeated."""

    @property
    def tables(self) -> list[str]:
        return [f"table{number:02d}" for number in range(self.num_tables)]

    @property
    def width(self) -> int:
        """Values of a sample that the dense model gets."""
        return self.num_tables * self.dim * (1 if self.is_pooled else self.keys_per_feature)


WORKLOADS = {
    "pooled": Workload("pooled", 8, 1_000_000, 4, 1024, is_pooled=True),
    "sequences": Workload("sequences", 8, 1_000_000, 4, 1024, is_pooled=False),
    "criteo": Workload("criteo", 26, 200_000, 1, 4096, is_pooled=True),
}
QUICK = {
    name: Workload(name, min(w.num_tables, 3), 1000, w.keys_per_feature, 32, w.is_pooled, 8, 16, 4)
    for name, w in WORKLOADS.items()
}


@dataclass(frozen=True)
class RankBatch:
    keys: Tensor
    """[tables, samples, keys of a feature]."""
    labels: Tensor


@lru_cache(maxsize=4)
def make_batches(work: Workload, rank: int) -> list[RankBatch]:
    """Returns the batches of a rank: Zipf-distributed keys. Which key is frequent is the same on all ranks."""
    generator = np.random.default_rng([SEED, rank])
    shape = work.num_batches, work.batch_size, work.keys_per_feature
    orders = [np.random.default_rng([SEED, number]).permutation(work.num_rows) for number in range(work.num_tables)]
    drawn = [order[zipf_ranks(work.num_rows, shape, generator)] for order in orders]
    labels = generator.integers(0, 2, shape[:2]).astype(np.float32)
    return [
        RankBatch(torch.from_numpy(np.stack([table[number] for table in drawn])), torch.from_numpy(labels[number]))
        for number in range(work.num_batches)
    ]


def initial_rows(table: int, keys: Tensor, dim: int) -> Tensor:
    """Returns the same rows in both systems: numbers between -0.05 and 0.05 that depend on table, key and column."""
    columns = torch.arange(dim) * 40_503
    mixed: Tensor = (keys[:, None] * 7_919 + columns + table * 1_299_709) % 65_521
    return mixed.float().div_(65_521).sub_(0.5).mul_(0.1)


def key_ranges(first: int, end: int) -> Iterator[Tensor]:
    """Returns keys first .. end - 1, some at a time."""
    for begin in range(first, end, ROWS_AT_A_TIME):
        yield torch.arange(begin, min(begin + ROWS_AT_A_TIME, end))


def sampled_keys(work: Workload, table: int) -> Tensor:
    """Returns some keys that are trained often, to compare their rows at the end."""
    keys = torch.cat([batch.keys[table].flatten() for rank in range(2) for batch in make_batches(work, rank)])
    distinct, counts = keys.unique(return_counts=True)
    chosen: Tensor = distinct[counts.argsort(descending=True, stable=True)[:200]]
    return chosen.sort().values


class Dense(nn.Module):
    """Two hidden layers on all values of a sample. Returns the loss of each sample."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.Sequential(
            *(nn.Linear(work.width, work.hidden), nn.ReLU(), nn.Linear(work.hidden, work.hidden), nn.ReLU()),
            nn.Linear(work.hidden, 1),
        )

    def forward(self, values: Tensor, labels: Tensor) -> Tensor:
        logits = self.layers(values).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LEARNING_RATE)


def trained(work: Workload, dense: Mapping[str, Tensor], rows: Mapping[int, Tensor]) -> dict[str, NDArray[np.float32]]:
    """Returns how far weights have moved from where they began. rows: those of `sampled_keys`, by table number."""
    before = Dense(work).state_dict()
    moved = {name: tensor.detach() - before[name] for name, tensor in dense.items()}
    for number, values in rows.items():
        moved[f"table {number}"] = values - initial_rows(number, sampled_keys(work, number), work.dim)
    return {name: tensor.numpy() for name, tensor in moved.items()}
