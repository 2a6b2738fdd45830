"""One rank of TorchRec. Run as a program, in the environment that has TorchRec."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedTensor, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from nestpipe.bench.peer import workload
from nestpipe.bench.peer.turns import Task, read_task, take_turns
from nestpipe.bench.peer.workload import Dense, Workload, make_batches

CPU = torch.device("cpu")


@dataclass
class Samples(Pipelineable):
    """A batch as TorchRec's pipeline takes it. It traces the model, so no field may be called `keys`."""

    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Samples":
        return Samples(self.features.to(device, non_blocking), self.labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        pass

    def pin_memory(self) -> "Samples":
        return self


class Model(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.work = work
        options = {"embedding_dim": work.dim, "num_embeddings": work.num_rows}
        if work.is_pooled:
            bags = [EmbeddingBagConfig(name=name, feature_names=[name], **options) for name in work.tables]
            self.sparse = EmbeddingBagCollection(tables=bags, device=torch.device("meta"))
        else:
            configs = [EmbeddingConfig(name=name, feature_names=[name], **options) for name in work.tables]
            self.sparse = EmbeddingCollection(tables=configs, device=torch.device("meta"))
        self.dense = Dense(work)

    def forward(self, batch: Samples) -> tuple[Tensor, Tensor]:
        found = self.sparse(batch.features)
        if self.work.is_pooled:
            values = found.values()
        else:
            width = self.work.keys_per_feature * self.work.dim
            values = torch.cat([found[name].values().view(-1, width) for name in self.work.tables], dim=1)
        losses = self.dense(values, batch.labels)
        return losses.mean(), losses.detach()


class TorchRecLoop:
    """Trains with DistributedModelParallel, and TrainPipelineSparseDist unless the way is plain."""

    def __init__(self, task: Task) -> None:
        self.work = task.work
        sharder = self._sharder(task.optimizer)
        model = Model(self.work)
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=ShardingPlan({"sparse": self._plan(model, sharder)}),
            sharders=[sharder],
        )
        self._fill()
        dense = {name: p for name, p in self.model.named_parameters() if ".dense." in f".{name}"}
        own = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, workload.LEARNING_RATE))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, own])
        self.batches = itertools.cycle(samples_of(self.work, dist.get_rank()))
        self.pipeline = None if task.way == "plain" else TrainPipelineSparseDist(self.model, self.optimizer, CPU)

    def _sharder(self, optimizer: str) -> Any:
        kind = EmbOptimType.EXACT_SGD if optimizer == "sgd" else EmbOptimType.EXACT_ROWWISE_ADAGRAD
        fused = {"optimizer": kind, "learning_rate": workload.LEARNING_RATE, "eps": workload.EPSILON}
        return (EmbeddingBagCollectionSharder if self.work.is_pooled else EmbeddingCollectionSharder)(fused)

    def _plan(self, model: Model, sharder: Any) -> Any:
        """Places whole tables, the first half on rank 0: TorchRec then sends one vector a sample and feature, and gives
        the features in the order of the tables."""
        size = dist.get_world_size()
        places = {
            table: table_wise(rank=number * size // self.work.num_tables, compute_kernel="fused")
            for number, table in enumerate(self.work.tables)
        }
        return construct_module_sharding_plan(model.sparse, places, sharder, size, size, "cpu")

    def _tables(self) -> Iterator[tuple[int, Any]]:
        for name, tensor in self.model.state_dict().items():
            for number, table in enumerate(self.work.tables):
                if f".{table}." in name:
                    yield number, tensor

    def _shards(self, tensor: Any) -> Iterator[tuple[int, int, Tensor]]:
        """Returns first row, first column and content of this rank's shards of a table."""
        if isinstance(tensor, ShardedTensor):
            for shard in tensor.local_shards():
                yield shard.metadata.shard_offsets[0], shard.metadata.shard_offsets[1], shard.tensor
        else:
            yield 0, 0, tensor

    def _fill(self) -> None:
        for number, tensor in self._tables():
            for first, column, content in self._shards(tensor):
                for keys in workload.key_ranges(first, first + len(content)):
                    rows = workload.initial_rows(number, keys, self.work.dim)
                    content[keys - first] = rows[:, column : column + content.shape[1]]

    def step(self) -> None:
        if self.pipeline is not None:
            self.pipeline.progress(self.batches)
            return
        self.optimizer.zero_grad()
        loss, _ = self.model(next(self.batches))
        loss.backward()
        self.optimizer.step()

    def weights(self) -> dict[str, NDArray[np.float32]]:
        rows = {}
        for number, tensor in self._tables():
            keys = workload.sampled_keys(self.work, number)
            rows[number] = torch.zeros(len(keys), self.work.dim)
            for first, column, content in self._shards(tensor):
                is_own = (keys >= first) & (keys < first + len(content))
                rows[number][is_own, column : column + content.shape[1]] = content[keys[is_own] - first]
            dist.all_reduce(rows[number])
        dense = {
            name.split("dense.", 1)[1].removeprefix("module."): parameter
            for name, parameter in self.model.named_parameters()
            if ".dense." in f".{name}"
        }
        return workload.trained(self.work, dense, rows)


def samples_of(work: Workload, rank: int) -> list[Samples]:
    lengths = torch.full((work.num_tables * work.batch_size,), work.keys_per_feature, dtype=torch.int32)
    return [
        Samples(KeyedJaggedTensor.from_lengths_sync(work.tables, batch.keys.flatten(), lengths), batch.labels)
        for batch in make_batches(work, rank)
    ]


def main() -> None:
    task = read_task()
    dist.init_process_group("gloo")
    loop = TorchRecLoop(task)
    take_turns(loop)
    os._exit(0)


if __name__ == "__main__":
    main()
