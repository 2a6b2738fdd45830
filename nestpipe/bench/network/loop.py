"""Training loops of `bench network`: batches, two kinds of dense compute, and loops that take turns."""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.bench.harness.ways import Way, count_exchanged, means
from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Batches
from nestpipe.data.synthetic.sequences import SequenceData
from nestpipe.distributed import World
from nestpipe.distributed.host_map import HostSetting
from nestpipe.embedding.cluster import BY_KEYS, Clustering
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.features import SequenceEmbedding
from nestpipe.embedding.group import group_features
from nestpipe.embedding.optim import Adagrad
from nestpipe.embedding.plan import requester_lists
from nestpipe.embedding.table import Feature, Table
from nestpipe.embedding.table import Sequence as SequenceFeature
from nestpipe.pipelining.light import LightStages
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import WINDOWED
from nestpipe.pipelining.step import MicroBatch, Step
from nestpipe.pipelining.trace import Span, Trace
from nestpipe.store.interface import Store
from nestpipe.train.reducer import DenseReducer

SEED = 1
FEATURE = "history"


@dataclass(frozen=True)
class Size:
    """Sizes for which a row exchange, or a gradient return, takes a quarter of a second on a link of 1 gbit."""

    batch_size: int = 512
    dim: int = 512
    hidden: int = 160
    num_micro_batches: int = 8
    num_batches: int = 4
    num_rounds: int = 15
    counted: int = 1
    """Counted steps of a turn."""
    num_probes: int = 15
    """Exchanges that measure the link's rate."""
    probe_bytes: int = 8_000_000


QUICK = Size(batch_size=64, dim=32, hidden=16, num_rounds=2, counted=1, num_probes=3, probe_bytes=500_000)


def make_batches(size: Size, rank: int, world_size: int) -> list[Batch]:
    """Makes batches of behaviour sequences. Input `share` is the sample's share of the batch's keys."""
    source = Batches(SequenceData(SEED), size.batch_size, rank, world_size)
    generator = torch.Generator().manual_seed(SEED)
    batches = []
    for batch in itertools.islice(source, size.num_batches):
        lengths = batch.keys[FEATURE].lengths.double()
        label = torch.randint(2, (len(batch),), generator=generator).float()
        batches.append(Batch(batch.keys, {"label": label, "share": lengths / lengths.sum()}))
    return batches


def make_features(dim: int) -> dict[str, Feature]:
    return {FEATURE: SequenceFeature(Table("item", dim, optimizer=Adagrad(0.01)))}


def exchanges_of(batches: Sequence[Batch], size: Size, rank: int, world_size: int) -> tuple[list[int], int]:
    """Returns the counts of `count_exchanged` summed over the batches, and the bytes of the smallest exchange."""
    totals, smallest = [0, 0, 0], 1 << 62
    features = group_features(make_features(size.dim))
    for batch in batches:
        dedup = dedup_batch(features, batch, size.num_micro_batches, world_size, 1, BY_KEYS).groups[0]
        rows_in, gradients_out = requester_lists(dedup, "once", rank)
        counted = count_exchanged(dedup, rows_in, gradients_out)
        totals = [total + more for total, more in zip(totals, counted, strict=True)]
        for counts in (rows_in.counts, gradients_out.counts):
            others = np.delete(counts, rank, axis=1)
            smallest = min(smallest, int(others.min()) * dedup.group.row_bytes)
    return totals, smallest


class Trained(nn.Module, ABC):
    """Dense compute of a loop."""

    @abstractmethod
    def train_on(self, micro_batch: MicroBatch, step: Step) -> None:
        """Computes the gradients of a micro-batch."""


class Paced(Trained):
    """Dense compute that takes time but no processor, as on an accelerator: a batch sleeps for `sleep_ms`, each
    micro-batch for its share of that. Gradients are constants."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.sleep_ms = 0.0
        self.weight = nn.Parameter(torch.zeros(size.dim, size.dim))
        self._gradient = torch.empty(0, size.dim)

    def train_on(self, micro_batch: MicroBatch, step: Step) -> None:
        time.sleep(float(micro_batch.inputs["share"].sum()) * self.sleep_ms / 1e3)
        for rows in micro_batch.rows:
            if len(rows) > len(self._gradient):
                self._gradient = torch.full(rows.shape, 1e-3)
            rows.grad = self._gradient[: len(rows)]
        self.weight.grad = torch.ones_like(self.weight)


class Tower(Trained):
    """Applies layers to every item of a history, sums the items of each sample, and computes a logit."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size.dim, size.hidden), nn.ReLU(), nn.Linear(size.hidden, size.hidden))
        self.out = nn.Linear(size.hidden, 1)
        generator = torch.Generator().manual_seed(SEED)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05, generator=generator)

    def train_on(self, micro_batch: MicroBatch, step: Step) -> None:
        history = micro_batch.embeddings[FEATURE]
        assert isinstance(history, SequenceEmbedding)
        (self._loss_sum(history, micro_batch.inputs["label"]) / step.weight).backward()

    def _loss_sum(self, history: SequenceEmbedding, label: Tensor) -> Tensor:
        items = torch.relu(self.layers(history.values))
        sample = torch.arange(len(label)).repeat_interleave(history.lengths)
        pooled = torch.zeros(len(label), items.shape[1]).index_add(0, sample, items)
        return nn.functional.binary_cross_entropy_with_logits(self.out(pooled).squeeze(1), label, reduction="sum")


MODELS: dict[str, Callable[[Size], Trained]] = {"paced": Paced, "real": Tower}


class Loop:
    """Trains in one way, turn by turn. Has its own channels, because lanes of another loop may still be busy."""

    def __init__(
        self,
        way: Way,
        model: Trained,
        features: dict[str, Feature],
        batches: list[Batch],
        world: World,
        threads: int,
        store: Store | None = None,
        replicas: int = 1,
        hosts: HostSetting = None,
        **options: Any,
    ) -> None:
        """replicas: groups of ranks that have all rows each. hosts: those of an exchange in two hops. options: further
        options of the pipeline."""
        self.world = World(world.rank, world.size, replicas=replicas, hosts=hosts)
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.reducer = DenseReducer(self.model, self.world)
        self.spans: list[Span] = []
        self.trace = Trace(spans=self.spans)
        self._overlaps = way.schedule in WINDOWED
        self.pipeline = Pipeline(
            features,
            itertools.cycle(batches),
            store=store,
            world=self.world,
            schedule=way.schedule,
            num_micro_batches=way.num_micro_batches,
            window=way.window,
            clustering=Clustering(way.method),
            stale=way.stale,
            cross_batch=way.cross_batch,
            seed=SEED,
            num_threads=threads,
            trace=self.trace,
            # A store that waits uses little processor time, but is not light.
            light_stages=None if store is None else LightStages(0.0),
            **options,
        )
        self._steps = iter(self.pipeline)
        self._next = next(self._steps)

    def turn(self, num_steps: int) -> dict[str, float]:
        """Trains, and returns the means of the last `num_steps` steps.

        The times of a step are complete when the next one has begun. So the first step of a turn, which began in the
        previous turn, does not count.
        """
        self.spans.clear()
        for _ in range(num_steps + 1):
            self._step()
        self.pipeline.executor.drain()
        return means(self.trace.steps[-num_steps:], self.world)

    def close(self) -> None:
        """Ends the lanes and frees their memory. The step that has begun is left. All ranks call it together."""
        self.pipeline.__exit__(None, None, None)

    def _step(self) -> None:
        step = self._next
        for micro_batch in step:
            with self.reducer.overlap(micro_batch.is_last and self._overlaps):
                self.model.train_on(micro_batch, step)
        self.reducer.finish(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        step.update_rows()
        self._next = next(self._steps)
