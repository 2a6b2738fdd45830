"""Rows of tables of any width and dtype in one message, in memory of both kinds, also through host memory.

Fails if lay_out does not begin a group's rows at a multiple of 16 bytes (float64 behind an odd number of float32), if
DistributedBatch.send_rows writes ahead another micro-batch than the next one, or if DeviceMemory reads a message's
places as numbers of rows.
"""

import pytest
import torch

from nestpipe import Batch, Pooled, Table, Trainer, World
from nestpipe.data import Jagged
from nestpipe.distributed import Channel
from nestpipe.embedding import device_memory
from nestpipe.embedding.device_memory import DeviceMemory
from nestpipe.embedding.optim import SGD, Adagrad
from nestpipe.pipelining import pipeline as pipeline_module
from tests.exactness.cases import on_ranks

TABLES = [
    Table("a", 3, optimizer=SGD(0.1)),
    Table("b", 5, optimizer=SGD(0.1), dtype=torch.float64),
    Table("c", 1, optimizer=SGD(0.1)),
    Table("d", 3, optimizer=SGD(0.1)),
]


class Sums(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, embeddings, inputs):
        return sum(((1 + i) * value.square().sum() * self.weight) for i, value in enumerate(embeddings.values()))


def batches(world: World) -> list[Batch]:
    batch_list = []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        lengths = torch.randint(0, 4, (12,), generator=generator) * (step != 3 or world.rank != 0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        keys = {
            table.name: Jagged(torch.randint(0, 30, (int(offsets[-1]),), generator=generator), offsets)
            for table in TABLES
        }
        batch_list.append(Batch(keys))
    return batch_list


class Passed:
    def synchronize(self) -> None:
        pass


def as_on_a_device(patch: pytest.MonkeyPatch, staged: bool) -> None:
    """Uses DeviceMemory on host memory, with the plain form of its kernels. staged: messages as in host memory."""
    patch.setattr(pipeline_module, "memory_on", lambda device, is_staged: DeviceMemory(device, is_staged))
    if staged:
        patch.setattr(Channel, "is_staged", property(lambda _: True))
        patch.setattr(device_memory, "mark", lambda _: Passed())
        patch.setattr(device_memory, "keep_alive_until", lambda *_: None)


def digests(world: World, way: str) -> list[str]:
    results = []
    for window in ("once", "resend"):
        for num_micro_batches in (1, 4):
            with pytest.MonkeyPatch.context() as patch:
                if way != "plain":
                    as_on_a_device(patch, staged=way == "staged")
                optimizers = (SGD(0.1), Adagrad(0.1), SGD(0.1), SGD(0.1))
                tables = [
                    Table(t.name, t.dim, optimizer=optimizer, dtype=t.dtype, frozen=t.name == "c")
                    for t, optimizer in zip(TABLES, optimizers, strict=True)
                ]
                trainer = Trainer(
                    Sums(),
                    {table.name: Pooled(table) for table in tables},
                    dense_optimizer=lambda p: torch.optim.SGD(p, 1e-4),
                    world=world,
                    schedule="serial" if way == "plain" else "nested",
                    num_micro_batches=num_micro_batches,
                    window=window,
                    check_split=False,
                )
                trainer.fit(batches(world))
                results.append(trainer.digest())
    return results


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_way_through_host_memory(size: int) -> None:
    """Has tables of mixed dtypes, two of them in a group and one frozen, and a rank without keys in one step."""
    (plain, *_), (on_device, *_), (staged, *_) = (
        on_ranks(size, digests, way) for way in ("plain", "on_device", "staged")
    )
    assert plain == on_device == staged
