"""Rows of tables of any width and dtype in one message, and the way through host memory.

Fails if Layout.rows does not begin a table's rows at a multiple of 16 bytes (float64 behind an odd number of float32),
or if Window.bring gives the rows of another micro-batch ahead than the next one.
"""

import pytest
import torch

from nestpipe import Batch, Pooled, Table, Trainer, World
from nestpipe.data import Jagged
from nestpipe.distributed import Channel
from nestpipe.embedding import window
from nestpipe.embedding.layout import Layout
from nestpipe.embedding.row_optimizer import SGD, Adagrad
from tests.exactness.cases import on_ranks

TABLES = [
    Table("a", 3, optimizer=SGD(0.1)),
    Table("b", 5, optimizer=SGD(0.1), dtype=torch.float64),
    Table("c", 1, optimizer=SGD(0.1)),
]


def test_every_row_has_bytes_of_its_own() -> None:
    layout = Layout(TABLES, [[1, 9, 3], [2, 9, 0], [0, 9, 5]], rank=1)
    assert layout.sizes == [16 + 80 + 0, 0, 48 + 0 + 32]
    assert layout.num_row_bytes == (12 + 80 + 0) + (36 + 0 + 20)
    message = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    parts = layout.rows(message)
    for number, (table, by_rank) in enumerate(zip(TABLES, parts, strict=True)):
        assert set(by_rank) == {0, 2}
        for rank, rows in by_rank.items():
            assert rows.dtype == table.dtype
            assert rows.data_ptr() % 16 == message.data_ptr() % 16
            rows += 10 * number + rank + 1
    for number, by_rank in enumerate(parts):
        for rank, rows in by_rank.items():
            assert rows.unique().tolist() == ([10 * number + rank + 1] if rows.numel() else [])


class Sums(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, embeddings, inputs):
        return sum(((1 + i) * value.square().sum() * self.weight) for i, value in enumerate(embeddings.values()))


def batches(world: World) -> list[Batch]:
    made = []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        lengths = torch.randint(0, 4, (12,), generator=generator) * (step != 3 or world.rank != 0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        keys = {
            table.name: Jagged(torch.randint(0, 30, (int(offsets[-1]),), generator=generator), offsets)
            for table in TABLES
        }
        made.append(Batch(keys))
    return made


class Passed:
    def synchronize(self) -> None:
        pass


def digests(world: World, staged: bool) -> list[str]:
    """Of runs whose messages lie in host memory, and so do the rows: for this test that is the other kind of memory."""
    found = []
    for mode in ("once", "resend"):
        for num_micro_batches in (1, 4):
            with pytest.MonkeyPatch.context() as patch:
                if staged:
                    patch.setattr(Channel, "is_staged", property(lambda _: True))
                    patch.setattr(window, "is_accelerator", lambda _: True)
                    patch.setattr(window, "mark", lambda _: Passed())
                    patch.setattr(window, "keep_alive_until", lambda *_: None)
                optimizers = (SGD(0.1), Adagrad(0.1), SGD(0.1))
                tables = [
                    Table(t.name, t.dim, optimizer=optimizer, dtype=t.dtype, frozen=t.name == "c")
                    for t, optimizer in zip(TABLES, optimizers, strict=True)
                ]
                trainer = Trainer(
                    Sums(),
                    {table.name: Pooled(table) for table in tables},
                    dense_optimizer=lambda p: torch.optim.SGD(p, 1e-4),
                    world=world,
                    schedule="nested" if staged else "serial",
                    num_micro_batches=num_micro_batches,
                    window=mode,
                    check_split=False,
                )
                trainer.fit(batches(world))
                found.append(trainer.digest())
    return found


def test_the_way_through_host_memory() -> None:
    """Tables of mixed dtypes, one frozen; a rank without keys for a step."""
    for size in (2, 3):
        (plain, *_), (staged, *_) = (on_ranks(size, digests, staged) for staged in (False, True))
        assert staged == plain
