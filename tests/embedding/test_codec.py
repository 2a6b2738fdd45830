"""A codec of one's own: float64 rows and gradients travel as float32. Every schedule gives the same bits with it.

Fails if DistributedBatch reads or writes a message without the codec, if plan_sends takes the row bytes of the group,
or if sum_limit does not ask the codec for its largest number.
"""

import pytest
import torch
from torch import Tensor, nn

import nestpipe
from nestpipe import Batch, Jagged, World
from nestpipe.embedding.exchange.codec import Codec
from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.memory import Memory
from nestpipe.pipelining import NonFiniteError
from nestpipe.pipelining.schedule import SCHEDULES
from tests.ranks import run_ranks


class Float32(Codec):
    def row_bytes(self, group: TableGroup) -> int:
        return group.dim * 4

    def largest(self, dtype: torch.dtype) -> float:
        return torch.finfo(torch.float32).max

    def write(self, memory: Memory, rows: Tensor, places, message: Tensor, message_places) -> None:
        encoded = (rows if places is None else rows[places]).float()
        memory.write_message(encoded, torch.arange(len(encoded)), message, message_places)

    def read(self, memory: Memory, message: Tensor, message_places, rows: Tensor, places) -> None:
        num_rows = len(rows) if places is None else len(places)
        encoded = memory.empty_rows(num_rows, rows.shape[1], torch.float32)
        memory.read_message(message, message_places, encoded, None)
        memory.copy_rows(encoded.to(rows.dtype), None, rows, places)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1 / 3, dtype=torch.float64))

    def forward(self, embeddings, inputs) -> Tensor:
        parts = torch.cat([embeddings["a"], embeddings["b"]], 1)
        return (self.scale * (parts - inputs["target"][:, None]).square().sum(1) * inputs["factor"]).sum()


def train(world: World, factor: float, **options) -> tuple[str, float, str]:
    """Returns the digest, the row bytes of all steps and the error."""
    tables = [
        nestpipe.Table(
            name, dim, init=nestpipe.init.Normal(0.3), optimizer=nestpipe.optim.SGD(0.01), dtype=torch.float64
        )
        for name, dim in (("a", 3), ("b", 5))
    ]
    features = {table.name: nestpipe.Pooled(table) for table in tables}
    generator = torch.Generator().manual_seed(world.rank)
    batches = []
    for step in range(4):
        keys = Jagged.from_lists([[i, 30 + step, 7 * i] for i in range(6)])
        inputs = {"target": torch.rand(6, generator=generator, dtype=torch.float64)}
        inputs["factor"] = torch.full((6,), factor if step == 2 else 1.0, dtype=torch.float64)
        batches.append(Batch({"a": keys, "b": keys}, inputs))

    def dense_optimizer(parameters):
        return torch.optim.SGD(parameters, 0.01)

    trainer = nestpipe.Trainer(Squares(), features, dense_optimizer=dense_optimizer, world=world, **options)
    try:
        result = trainer.fit(batches)
    except NonFiniteError as error:
        return trainer.digest(), 0.0, str(error)
    return trainer.digest(), sum(times.sizes["exchanged_row_bytes_per_step"] for times in result.times), ""


def train_every_way(world: World) -> dict[object, tuple[str, float, str]]:
    outcomes: dict[object, tuple[str, float, str]] = {"plain": train(world, 1.0, num_micro_batches=3)}
    codecs = {"row_dtype": Float32(), "gradient_dtype": Float32()}
    for schedule in SCHEDULES:
        outcomes[schedule] = train(world, 1.0, schedule=schedule, num_micro_batches=3, **codecs)
    outcomes["by name"] = train(world, 1.0, num_micro_batches=3, row_dtype="float32", gradient_dtype="float32")
    outcomes["too large"] = train(world, 1e39, num_micro_batches=3, **codecs)
    outcomes["large, plain"] = train(world, 1e39, num_micro_batches=3)
    return outcomes


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_same_bits_in_every_schedule(size: int) -> None:
    for outcomes in run_ranks(size, train_every_way):
        plain, too_large, large = (outcomes.pop(name) for name in ("plain", "too large", "large, plain"))
        assert len({digest for digest, *_ in outcomes.values()}) == 1
        assert outcomes["serial"][0] != plain[0]
        assert outcomes["serial"][1] * 2 == plain[1] > 0
        assert outcomes["by name"][1] == outcomes["serial"][1]
        assert "not finite" in too_large[2]
        assert large[2] == ""
