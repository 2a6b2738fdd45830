"""Part models of `bench h200`: click models with many tables on one accelerator, against the dense model alone.

Rows are in host memory. For each model serial and nested, both with one micro-batch, and the dense part alone take
turns. The dense part works on fixed embeddings.
"""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.bench.h200.one_rank import device_step_ms, mean_fields
from nestpipe.bench.harness.keys import zipf_keys
from nestpipe.bench.harness.pairs import spread
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed import World
from nestpipe.embedding.optim import SGD, Adagrad
from nestpipe.embedding.table import Feature, Pooled, Table
from nestpipe.models import DLRM
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer

NUM_DENSE = 13
NUM_BATCHES = 5
NUM_THREADS = 12
"""Threads of the store. The launching thread and the lanes need cores too."""
FILL_ROWS = 250_000


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its data."""

    name: str
    num_tables: int
    num_rows: int
    """Rows of each table."""
    dim: int
    batch_size: int
    most_keys: int
    """A feature has 1 .. most_keys keys, uniformly distributed."""
    has_adagrad: bool
    num_rounds: int = 5
    steps: int = 14
    left_out: int = 4
    """Steps at the beginning of a round that do not count, because the pipeline fills."""

    @property
    def features(self) -> dict[str, Feature]:
        optimizer = Adagrad(0.01) if self.has_adagrad else SGD(0.01)
        tables = (Table(f"t{i:02d}", self.dim, optimizer=optimizer) for i in range(self.num_tables))
        return {table.name: Pooled(table) for table in tables}


SHAPES = (
    Shape("dlrm", 26, 1_000_000, 128, 32_768, 1, has_adagrad=True),
    Shape("multi-hot-sgd", 20, 500_000, 64, 16_384, 10, has_adagrad=False),
)


def records(world: World, quick: bool) -> Iterator[Record]:
    torch.set_num_threads(1)  # small operations of lanes are slower if they wait for other threads on busy cores
    for shape in SHAPES:
        size = replace(shape, num_rows=500, batch_size=64, num_rounds=2, steps=6, left_out=3) if quick else shape
        yield from _compared(world, size)


class MultiHot(nn.Module):
    """A perceptron on the concatenated features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, embeddings: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
        logits = self.layers(torch.cat(list(embeddings.values()), dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, inputs["click"].to(logits.dtype), reduction="sum")


def make_model(shape: Shape, device: torch.device) -> nn.Module:
    if shape.name == "dlrm":
        model: nn.Module = DLRM(NUM_DENSE, tuple(shape.features), shape.dim, (512, 256), (1024, 1024, 512))
    else:
        torch.manual_seed(0)
        model = MultiHot(shape.num_tables * shape.dim)
    return model.to(device)


def make_batches(shape: Shape) -> list[Batch]:
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(NUM_BATCHES):
        keys = {}
        for name in shape.features:
            lengths = generator.integers(1, shape.most_keys + 1, shape.batch_size)
            offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
            keys[name] = Jagged(zipf_keys(shape.num_rows, (int(offsets[-1]),), generator), offsets)
        dense = torch.from_numpy(generator.random((shape.batch_size, NUM_DENSE), dtype=np.float32))
        click = torch.from_numpy(generator.integers(0, 2, shape.batch_size).astype(np.float32))
        batches.append(Batch(keys, {"dense": dense, "click": click}))
    return batches


def make_trainer(world: World, shape: Shape, schedule: str) -> Trainer:
    trainer = Trainer(
        make_model(shape, world.device),
        shape.features,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=world.device.type == "cuda"),
        world=world,
        schedule=schedule,
        num_threads=NUM_THREADS,
        check_split=False,
        autocast=torch.bfloat16,
    )
    for table in trainer.tables:
        width = trainer.store.spec(table.name).num_columns
        rows = (
            torch.randn(min(FILL_ROWS, shape.num_rows), width, generator=torch.Generator().manual_seed(0)).abs() * 0.02
        )
        for keys in torch.arange(shape.num_rows).split(len(rows)):
            trainer.store.scatter(table.name, keys, rows[: len(keys)], 0)
    return trainer


class DenseStep:
    """One step of the dense model on fixed embeddings: forward, backward, optimizer."""

    def __init__(self, model: nn.Module, shape: Shape, batch: Batch, device: torch.device) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=device.type == "cuda")
        self.device = device
        self.embeddings = {
            name: (torch.randn(shape.batch_size, shape.dim, device=device) * 0.02).requires_grad_()
            for name in shape.features
        }
        self.inputs = {name: values.to(device) for name, values in batch.inputs.items()}

    def __call__(self) -> None:
        self.model.zero_grad()
        for embedding in self.embeddings.values():
            embedding.grad = None
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(self.embeddings, self.inputs) / len(self.inputs["click"])
        loss.backward()
        self.optimizer.step()


def _compared(world: World, shape: Shape) -> Iterator[Record]:
    batches = make_batches(shape)
    trainers = {schedule: make_trainer(world, shape, schedule) for schedule in ("serial", "nested")}
    dense = DenseStep(make_model(shape, world.device), shape, batches[0], world.device)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ("dense", *trainers)}
    for number in range(shape.num_rounds + 1):  # the first round warms up
        means = {name: _round(trainer, batches, shape) for name, trainer in trainers.items()}
        means["dense"] = {
            "step_ms": statistics.mean(device_step_ms(dense, shape.steps, world.device)[shape.left_out :])
        }
        if number > 0:
            for name, fields in means.items():
                rounds[name].append(fields)
    identity: dict[str, int | str] = {
        "model": shape.name,
        "ranks": 1,
        "num_micro_batches": 1,
        "dim": shape.dim,
        "tables": shape.num_tables,
        "num_rows": shape.num_rows,
        "batch_size": shape.batch_size,
        "threads": NUM_THREADS,
    }
    for schedule in trainers:
        figures = {field: statistics.median(r[field] for r in rounds[schedule]) for field in rounds[schedule][0]}
        ratios = [m["step_ms"] / d["step_ms"] for m, d in zip(rounds[schedule], rounds["dense"], strict=True)]
        unsplit = {"dense_unsplit_ms": statistics.median(r["step_ms"] for r in rounds["dense"])}
        yield {
            "schedule": schedule,
            **identity,
            **figures,
            **unsplit,
            **spread("step_over_dense_unsplit", ratios),
        }


def _round(trainer: Trainer, batches: list[Batch], shape: Shape) -> dict[str, float]:
    """Returns means over the counted steps of a round."""
    result = FitResult()
    trainer.fit(itertools.cycle(batches), shape.steps, result=result)
    return mean_fields(list(result.times)[shape.left_out :])
