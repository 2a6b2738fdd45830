"""`bench plain`: our step on one rank, inter and serial, against a plain PyTorch loop with sparse `nn.Embedding`.

All train the same model on the same batches from the same rows, with one key per table and sample. The first steps,
which are not timed, must give the same losses. Another loop runs the dense part alone, on fixed embeddings. The
difference to it is what the embeddings of a loop cost.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.keys import zipf_keys
from nestpipe.bench.harness.pairs import spread, take_turns
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch, Jagged
from nestpipe.embedding.optim import Adagrad, Adam, RowOptimizer
from nestpipe.embedding.table import Feature, Pooled, Table, make_store, tables_of
from nestpipe.pipelining.pipeline import pipeline

SEED = 1
TABLE_SIZES = (250_000,) * 2 + (100_000,) * 4 + (5_000,) * 20
"""Rows of the 26 tables, a million in total: a few large tables and many small ones, as in advertising data."""
DIM = 64
HIDDEN = 256
BATCH_SIZE = 4096
NUM_BATCHES = 16
STEPS_A_ROUND = 4
NUM_ROUNDS = 21
WARM_UP_STEPS = 4


@dataclass(frozen=True)
class Method:
    """A row optimizer, and the torch optimizer with the same formula."""

    name: str
    ours: Callable[[], RowOptimizer]
    plain: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


METHODS = (
    Method("adagrad", lambda: Adagrad(0.01), lambda parameters: torch.optim.Adagrad(parameters, 0.01)),
    Method("adam", lambda: Adam(0.001), lambda parameters: torch.optim.SparseAdam(list(parameters), 0.001)),
)


def records(quick: bool) -> Iterator[Record]:
    scale = 50 if quick else 1
    sizes = [size // scale for size in TABLE_SIZES]
    for method in METHODS:
        yield _compare(method, sizes, BATCH_SIZE // scale, 3 if quick else NUM_ROUNDS)


BENCHMARK = Benchmark(
    "plain", records, "Steps of one rank, inter and serial, against a plain PyTorch loop with sparse embeddings."
)


class Dense(nn.Module):
    """The model on top of the embeddings. Returns the loss sum of a batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.hidden = nn.Linear(width, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, embedded: Tensor, labels: Tensor) -> Tensor:
        logits = self.out(torch.relu(self.hidden(embedded))).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


class Loop:
    """Trains step by step, repeating the same batches."""

    def __init__(self, width: int) -> None:
        self.dense = Dense(width)
        self.optimizer = torch.optim.Adam(self.dense.parameters(), 1e-3)

    def step(self) -> float:
        raise NotImplementedError

    def round(self) -> None:
        for _ in range(STEPS_A_ROUND):
            self.step()


class DenseLoop(Loop):
    """Trains the dense part alone, on fixed embeddings."""

    def __init__(self, width: int, labels: list[Tensor]) -> None:
        super().__init__(width)
        self.embedded = torch.randn(len(labels[0]), width).mul_(0.02).requires_grad_()
        self.labels = itertools.cycle(labels)

    def step(self) -> float:
        loss = self.dense(self.embedded, next(self.labels)) / len(self.embedded)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.embedded.grad = None
        return float(loss.detach())


class PlainLoop(Loop):
    """Trains with `nn.Embedding` and torch's sparse optimizers."""

    def __init__(self, method: Method, rows: list[Tensor], keys: list[Tensor], labels: list[Tensor]) -> None:
        super().__init__(len(rows) * DIM)
        embeddings = [nn.Embedding.from_pretrained(r, freeze=False, sparse=True) for r in rows]
        self.embeddings = nn.ModuleList(embeddings)
        self.row_optimizer = method.plain(self.embeddings.parameters())
        self.batches = itertools.cycle(zip(keys, labels, strict=True))

    def step(self) -> float:
        keys, labels = next(self.batches)
        embedded = [embedding(column) for embedding, column in zip(self.embeddings, keys, strict=True)]
        loss = self.dense(torch.cat(embedded, dim=1), labels) / len(labels)
        loss.backward()
        self.optimizer.step()
        self.row_optimizer.step()
        self.optimizer.zero_grad()
        self.row_optimizer.zero_grad()
        return float(loss.detach())


class OurLoop(Loop):
    """Trains with a pipeline in a custom loop, as in examples/own_model.py. One rank has nothing to reduce."""

    def __init__(
        self, method: Method, schedule: str, sizes: list[int], keys: list[Tensor], labels: list[Tensor]
    ) -> None:
        super().__init__(len(sizes) * DIM)
        names = [f"table{t:02}" for t in range(len(sizes))]
        self.tables = [Table(name, DIM, optimizer=method.ours()) for name in names]
        features: dict[str, Feature] = {table.name: Pooled(table) for table in self.tables}
        batches = [
            Batch({name: Jagged.one_each(column) for name, column in zip(names, k, strict=True)}, {"label": label})
            for k, label in zip(keys, labels, strict=True)
        ]
        self.store = make_store(tables_of(features), SEED, num_threads=1)
        self.rows = [self._create_rows(table, size) for table, size in zip(self.tables, sizes, strict=True)]
        self.pipeline = iter(
            pipeline(features, itertools.cycle(batches), store=self.store, schedule=schedule, seed=SEED)
        )

    def _create_rows(self, table: Table, num_rows: int) -> Tensor:
        """Writes the table's initial rows to the store, as `nn.Embedding` has all its rows from the beginning."""
        keys = torch.arange(num_rows)
        records = self.store.gather(table.name, keys).records
        self.store.scatter(table.name, keys, records, step=0)
        return records[:, : table.dim].contiguous()

    def step(self) -> float:
        step = next(self.pipeline)
        for micro_batch in step:
            loss = self.dense(micro_batch.embeddings.side_by_side(), micro_batch.inputs["label"]) / step.weight
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        step.update_rows()
        return float(loss.detach())


def _compare(method: Method, sizes: list[int], batch_size: int, num_rounds: int) -> Record:
    torch.set_num_threads(1)
    generator = np.random.default_rng(SEED)
    drawn = [zipf_keys(size, (NUM_BATCHES, batch_size), generator) for size in sizes]
    keys = list(torch.stack(drawn, dim=1))  # one [tables, samples] tensor per batch
    labels = [torch.from_numpy(generator.integers(2, size=batch_size)).float() for _ in keys]
    inter, serial = (OurLoop(method, schedule, sizes, keys, labels) for schedule in ("inter", "serial"))
    plain = PlainLoop(method, inter.rows, keys, labels)
    dense = DenseLoop(len(sizes) * DIM, labels)
    _check_same_training(inter, serial, plain)
    seconds = take_turns([plain.round, inter.round, serial.round, dense.round], num_rounds)
    plain_s, inter_s, serial_s, dense_s = ([s / STEPS_A_ROUND for s in rounds] for rounds in seconds)

    def embedding_speed(ours: list[float]) -> list[float]:
        return [(p - d) / (o - d) for p, o, d in zip(plain_s, ours, dense_s, strict=True)]

    return {
        "method": method.name,
        "dim": DIM,
        "threads": 1,
        "ranks": 1,
        "schedule": "inter",
        "num_micro_batches": 1,
        "num_tables": len(sizes),
        "num_rows": sum(sizes),
        "batch_size": batch_size,
        "num_rounds": num_rounds,
        "seed": SEED,
        "plain_ms": statistics.median(plain_s) * 1e3,
        "ours_ms": statistics.median(inter_s) * 1e3,
        "serial_ms": statistics.median(serial_s) * 1e3,
        "dense_ms": statistics.median(dense_s) * 1e3,
        **spread("embedding_speed_vs_plain", embedding_speed(inter_s)),
        **spread("serial_embedding_speed_vs_plain", embedding_speed(serial_s)),
        **spread("speed_vs_plain", [p / o for p, o in zip(plain_s, inter_s, strict=True)]),
    }


def _check_same_training(*loops: Loop) -> None:
    """Raises RuntimeError if losses differ: a loop that does less work than the others would win."""
    for number in range(WARM_UP_STEPS):
        losses = [loop.step() for loop in loops]
        if not all(math.isclose(loss, losses[0], rel_tol=1e-4) for loss in losses):
            raise RuntimeError(f"step {number}: the losses are {losses}; they must be the same")
