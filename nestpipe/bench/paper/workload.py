"""Work of `bench paper`: batches, a slow store, and an HSTU, for the loops of `bench network`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nestpipe.bench.h200.data import Shape
from nestpipe.bench.h200.one_rank import Size as ModelSize
from nestpipe.bench.h200.one_rank import make_model
from nestpipe.bench.network import loop as network
from nestpipe.bench.network.loop import FEATURE, SEED, Trained
from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Batches
from nestpipe.data.synthetic.sequences import SequenceData
from nestpipe.pipelining.step import MicroBatch, Step
from nestpipe.store import HostStore


@dataclass(frozen=True)
class Size(network.Size):
    """Sizes of the measurement with paced compute. Rows have half of the smallest published dim."""

    dim: int = 256
    hidden: int = 16
    num_batches: int = 6
    """With fewer, the half that a batch adds would still be in the row pool from its last use."""
    num_rounds: int = 5
    end_to_end_rounds: int = 9
    splits: tuple[int, ...] = (2, 4, 8, 16, 32)
    """Numbers of micro-batches that are compared."""


QUICK = Size(batch_size=32, dim=16, num_batches=3, num_micro_batches=2, num_rounds=1, end_to_end_rounds=1, splits=(2,))


@dataclass(frozen=True)
class RealSize:
    """Sizes of the measurement with real compute: dims and lengths are a quarter of the published ones."""

    dim: int = 128
    num_layers: int = 4
    length: int = 128
    tokens: int = 4096
    """Tokens of a rank's batch."""
    num_heads: int = 4
    num_negatives: int = 16
    num_distinct: int = 3000
    overlap: float = 0.5
    num_batches: int = 4
    num_micro_batches: int = 4
    num_keys: int = 20_000
    num_rounds: int = 5
    ns_per_byte: float = 60.0
    """Time of the slow store for a byte of a record."""


QUICK_REAL = RealSize(16, 2, 8, 64, 2, 2, 40, num_batches=3, num_micro_batches=2, num_keys=400, num_rounds=1)
BASE = "base"


@dataclass(frozen=True)
class Case:
    """The base case, or one in which the size that `varied` names is another."""

    varied: str
    dim: int
    num_layers: int
    length: int


def real_cases(size: RealSize) -> list[Case]:
    base = Case(BASE, size.dim, size.num_layers, size.length)
    return [
        base,
        *(replace(base, varied="dim", dim=dim) for dim in (size.dim * 3 // 2, size.dim * 2)),
        *(replace(base, varied="num_layers", num_layers=n) for n in (size.num_layers // 2, size.num_layers * 2)),
        *(replace(base, varied="length", length=length) for length in (size.length * 2, size.length * 4)),
    ]


def model_size(size: RealSize, case: Case) -> tuple[ModelSize, Shape]:
    """Returns the sizes of a case's model and of its batches."""
    num_samples = size.tokens // case.length
    shape = Shape(num_samples, case.length, size.num_negatives, size.num_distinct, size.overlap, size.num_batches)
    made = ModelSize(dim=case.dim, num_layers=case.num_layers, num_heads=size.num_heads, num_threads=1)
    return made, shape


class SlowStore(HostStore):
    """Host store whose reads take time but no processor, as if rows came from far away."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.ms_per_key = 0.0
        self.num_read = 0
        """Keys read so far."""

    def gather_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        out: Tensor,
        places: Tensor | None,
        found: Tensor | None = None,
    ) -> Tensor:
        self.num_read += len(keys)
        time.sleep(len(keys) * self.ms_per_key / 1e3)
        return super().gather_tables(tables, offsets, keys, out, places, found)


def sliding_batches(size: Size, rank: int, world_size: int) -> list[Batch]:
    """Makes batches of behaviour sequences. Half of a batch's samples are also in the previous one; the first follows
    the last. Input `share` is a sample's share of the batch's keys."""
    half = size.batch_size // 2
    source = iter(Batches(SequenceData(SEED), half, rank, world_size))
    halves = [next(source).keys[FEATURE] for _ in range(size.num_batches)]
    batches = []
    for number, half_keys in enumerate(halves):
        keys = _joined(halves[number - 1], half_keys)
        lengths = keys.lengths.double()
        batches.append(Batch({FEATURE: keys}, {"share": lengths / lengths.sum()}))
    return batches


def _joined(one: Jagged, other: Jagged) -> Jagged:
    offsets = torch.cat([one.offsets, other.offsets[1:] + one.offsets[-1]])
    return Jagged(torch.cat([one.values, other.values]), offsets)


def overlap_of(batches: Sequence[Batch]) -> float:
    """Returns the mean share of a batch's distinct keys that the previous batch has, too."""
    keys = [batch.keys[FEATURE].values.unique() for batch in batches]
    shares = [torch.isin(mine, keys[number - 1]).double().mean() for number, mine in enumerate(keys)]
    return float(sum(shares) / len(shares))


class NextItem(Trained):
    """An HSTU that predicts the next item."""

    def __init__(self, size: ModelSize, shape: Shape) -> None:
        super().__init__()
        self.hstu = make_model(size, shape, torch.device("cpu"))

    def train_on(self, micro_batch: MicroBatch, step: Step) -> None:
        (self.hstu(micro_batch.embeddings, micro_batch.inputs) / step.weight).backward()
