"""One rank of ours: nestpipe, or the dense part alone. Run as a program."""

import itertools
import os

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nestpipe.bench.peer import workload
from nestpipe.bench.peer.turns import Loop, Task, read_task, take_turns
from nestpipe.bench.peer.workload import Dense, Workload, make_batches
from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed import World
from nestpipe.embedding.features import SequenceEmbedding
from nestpipe.embedding.optim import SGD, RowOptimizer, RowWiseAdagrad
from nestpipe.embedding.table import Feature, Pooled, Sequence, Table, make_store, tables_of
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import WINDOWED
from nestpipe.pipelining.step import MicroBatch
from nestpipe.store import Store, group_by_owner
from nestpipe.train.reducer import DenseReducer


def row_optimizer(name: str) -> RowOptimizer:
    if name == "sgd":
        return SGD(workload.LEARNING_RATE)
    return RowWiseAdagrad(workload.LEARNING_RATE, eps=workload.EPSILON)


class OurLoop:
    """Trains with a pipeline in a custom loop."""

    def __init__(self, task: Task, world: World) -> None:
        self.work, self.world = task.work, world
        tables = [Table(name, self.work.dim, optimizer=row_optimizer(task.optimizer)) for name in self.work.tables]
        kind = Pooled if self.work.is_pooled else Sequence
        features: dict[str, Feature] = {table.name: kind(table) for table in tables}
        self.store = make_store(tables_of(features), workload.SEED, num_threads=1)
        fill(self.store, tables, self.work, world)
        self.dense = Dense(self.work)
        self.optimizer = workload.dense_optimizer(self.dense)
        self.reducer = DenseReducer(self.dense, world)
        self.overlaps = task.way in WINDOWED
        self.pipeline = Pipeline(
            features,
            itertools.cycle(batches_of(self.work, world.rank)),
            store=self.store,
            world=world,
            schedule=task.way,
            num_micro_batches=task.num_micro_batches,
            seed=workload.SEED,
        )
        self._steps = iter(self.pipeline)

    def step(self) -> None:
        step = next(self._steps)
        for micro_batch in step:
            with self.reducer.overlap(micro_batch.is_last and self.overlaps):
                losses = self.dense(self._values(micro_batch), micro_batch.inputs["label"])
                (losses.sum() / step.weight).backward()
        self.reducer.finish(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        step.update_rows()

    def _values(self, micro_batch: MicroBatch) -> Tensor:
        if self.work.is_pooled:
            return micro_batch.embeddings.side_by_side()
        parts = []
        for name in self.work.tables:
            embedding = micro_batch.embeddings[name]
            assert isinstance(embedding, SequenceEmbedding)
            parts.append(embedding.values.view(len(micro_batch.inputs["label"]), -1))
        return torch.cat(parts, dim=1)

    def weights(self) -> dict[str, NDArray[np.float32]]:
        self.pipeline.flush()
        rows = {}
        for number, table in enumerate(self.work.tables):
            gathered = self.store.gather(table, workload.sampled_keys(self.work, number), rows_only=True)
            rows[number] = gathered.records * gathered.found[:, None]
            dist.all_reduce(rows[number])
        return workload.trained(self.work, self.dense.state_dict(), rows)


def fill(store: Store, tables: list[Table], work: Workload, world: World) -> None:
    """Writes the rows of this rank."""
    for number, table in enumerate(tables):
        store.reserve(table.name, work.num_rows // world.size)
        state = torch.tensor(table.spec(0).initial_state)
        for keys in workload.key_ranges(0, work.num_rows):
            order, counts = group_by_owner(table.name, keys, world.size)
            own = keys[order.split(counts.tolist())[world.rank]]
            rows = workload.initial_rows(number, own, work.dim)
            store.scatter(table.name, own, torch.cat([rows, state.expand(len(own), -1)], dim=1), step=0)


def batches_of(work: Workload, rank: int) -> list[Batch]:
    offsets = torch.arange(work.batch_size + 1) * work.keys_per_feature
    return [
        Batch(
            {name: Jagged(keys.flatten(), offsets) for name, keys in zip(work.tables, batch.keys, strict=True)},
            {"label": batch.labels},
        )
        for batch in make_batches(work, rank)
    ]


class DenseLoop:
    """Trains the dense part alone, with its all-reduce, on fixed values."""

    def __init__(self, task: Task, world: World) -> None:
        work = task.work
        self.batches = itertools.cycle(make_batches(work, world.rank))
        self.dense = Dense(work)
        # As TorchRec does.
        self.model = DistributedDataParallel(self.dense, gradient_as_bucket_view=True, static_graph=True)
        self.optimizer = workload.dense_optimizer(self.dense)
        self.values = torch.rand(work.batch_size, work.width).sub_(0.5).mul_(0.1).requires_grad_()

    def step(self) -> None:
        self.model(self.values, next(self.batches).labels).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.values.grad = None

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return {}


def main() -> None:
    task = read_task()
    world = World.from_environment(device="cpu")
    loop: Loop = DenseLoop(task, world) if task.way == "dense" else OurLoop(task, world)
    take_turns(loop)
    os._exit(0)  # does not wait for lanes, which wait for further steps


if __name__ == "__main__":
    main()
