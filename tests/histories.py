"""Small histories, their next items and negatives, as the models of histories receive them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import nestpipe
from nestpipe import Batch, Jagged, Table

NUM_ITEMS = 30


@dataclass
class Rows:
    """A feature whose samples have any number of rows."""

    rows: Tensor
    index: Tensor
    offsets: Tensor
    table_name: str = "item"

    @property
    def table(self) -> Table:
        return Table(self.table_name, self.rows.shape[1], dtype=self.rows.dtype)

    @property
    def host_lengths(self) -> list[int]:
        return self.offsets.diff().tolist()

    @property
    def values(self) -> Tensor:
        return F.embedding(self.index, self.rows)

    def take(self, samples: Tensor) -> "Rows":
        jagged = Jagged(self.index, self.offsets).take(samples)
        return replace(self, index=jagged.values, offsets=jagged.offsets)


def histories(
    lengths: Sequence[int], max_length: int, num_negatives: int = 3, per: str = "position", seed: int = 0
) -> Batch:
    """Makes a batch of keys below NUM_ITEMS. Some negatives are the next item."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths, dtype=torch.int64)
    number = counts if per == "position" else torch.ones_like(counts)

    def keys(lengths: Tensor) -> Jagged:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Jagged(torch.randint(NUM_ITEMS, (int(offsets[-1]),), generator=generator), offsets)

    # Gaps from zero to years, and clocks that were set back.
    gaps = torch.rand(len(counts), max_length + 1, generator=generator).mul(19).exp().long() - 1
    times = gaps.cumsum(1) - torch.randint(100, gaps.shape, generator=generator)
    features = {"history": keys(counts), "target": keys(torch.ones_like(counts))}
    return Batch(features | {"negatives": keys(number * num_negatives)}, {"times": times}, weight=float(counts.sum()))


def embedded(batch: Batch, rows: Tensor) -> dict[str, Rows]:
    """Returns the features of a batch, with key i in row i."""
    return {name: Rows(rows, jagged.values, jagged.offsets) for name, jagged in batch.keys.items()}


def features(table: nestpipe.Table) -> dict[str, nestpipe.Sequence]:
    return {name: nestpipe.Sequence(table) for name in ("history", "target", "negatives")}
