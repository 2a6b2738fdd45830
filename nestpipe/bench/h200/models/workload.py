"""A workload of part models: a model, its features, and batches of Zipf-distributed keys that never repeat."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.bench.harness.keys import SKEW
from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.optim import RowOptimizer
from nestpipe.embedding.table import Feature, Pooled, Sequence, Table

SMALL_ROWS, SMALL_BATCH = 300, 96
"""Rows of a table and samples of a batch where digests are compared, and in a quick run."""


@dataclass(frozen=True)
class Lists:
    """The keys that a feature has in a sample."""

    least: int
    most: int
    """Uniformly distributed between least and most."""
    is_sequence: bool = False


@dataclass(frozen=True)
class Workload:
    """A model and its data."""

    name: str
    num_rows: int
    """Rows of each table."""
    batch_size: int
    lists: Mapping[str, Lists]
    """Keys of each feature."""
    table_of: Callable[[str], str]
    """Name of a feature's table."""
    dims: Mapping[str, int]
    """Dim of each table."""
    optimizer: RowOptimizer
    make_model: Callable[["Workload"], nn.Module]
    num_dense: int = 0
    """Dense inputs of a sample."""
    resident_share: float | None = None
    """Share of the rows for which the row pool has room; None for "auto"."""
    num_micro_batches: int = 1
    compiled: bool = False
    """True if the dense model is compiled by torch."""

    @property
    def features(self) -> dict[str, Feature]:
        tables = {name: Table(name, dim, optimizer=self.optimizer) for name, dim in self.dims.items()}
        made: dict[str, Feature] = {}
        for name, lists in self.lists.items():
            table = tables[self.table_of(name)]
            made[name] = Sequence(table) if lists.is_sequence else Pooled(table)
        return made

    @property
    def small(self) -> "Workload":
        """Returns the same model with small tables and batches."""
        return replace(self, num_rows=SMALL_ROWS, batch_size=SMALL_BATCH, resident_share=None)

    def batches(self, number: int, seed: int = 0) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [self._batch(generator) for _ in range(number)]

    def _batch(self, generator: torch.Generator) -> Batch:
        keys = {name: self._keys(lists, generator) for name, lists in self.lists.items()}
        inputs = {"click": torch.randint(0, 2, (self.batch_size,), generator=generator).float()}
        if self.num_dense > 0:
            inputs["dense"] = torch.rand(self.batch_size, self.num_dense, generator=generator)
        return Batch(keys, inputs)

    def _keys(self, lists: Lists, generator: torch.Generator) -> Jagged:
        lengths = torch.randint(lists.least, lists.most + 1, (self.batch_size,), generator=generator)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        drawn = torch.rand(int(offsets[-1]), generator=generator, dtype=torch.float64)
        ranks = torch.searchsorted(_cumulative(self.num_rows), drawn).clamp_(max=self.num_rows - 1)
        return Jagged(keys_of_ranks(ranks, self.num_rows), offsets)


@cache
def _cumulative(num_ranks: int) -> Tensor:
    """Returns the probability of a rank up to each."""
    weights = np.cumsum(np.arange(1, num_ranks + 1, dtype=np.float64) ** -SKEW)
    return torch.from_numpy(weights / weights[-1])


def keys_of_ranks(ranks: Tensor, num_rows: int) -> Tensor:
    """Returns the key of each rank of use. Hot keys are scattered: the factor is a prime."""
    return ranks * 7_919 % num_rows
