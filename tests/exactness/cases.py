"""Training runs for the exactness tests: features, data, a model, row optimizers, and the same in plain PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.data import Batch, Jagged
from nestpipe.distributed import World
from nestpipe.embedding.cluster import Clustering
from nestpipe.embedding.optim import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from nestpipe.embedding.table import Feature, Pooled, Sequence, Table
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.store import init
from nestpipe.train.trainer import Trainer
from tests.ranks import run_ranks

NUM_KEYS = 60
STEPS = 50
GLOBAL_BATCH = 24


class Momentum(RowOptimizer):
    """A user's own row optimizer."""

    def state_width(self, dim: int) -> int:
        return dim

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        state.mul_(0.9).add_(gradient)
        rows.sub_(state * lr)


OPTIMIZERS = {
    "sgd": lambda: SGD(0.5, weight_decay=0.01),
    "adagrad": lambda: Adagrad(0.1, initial_accumulator=0.1),
    "rowwise_adagrad": lambda: RowWiseAdagrad(0.1, initial_accumulator=0.1),
    "adam": lambda: Adam(lambda step: 0.05 / step**0.5),
    "own": lambda: Momentum(0.1),
}
SLOW_DECAY = {"adam_slow_decay": lambda: Adam(0.05, betas=(0.9, 0.999999))}
"""A beta2 so near 1 that 1 - beta2 has few correct digits in float32."""
LAYOUTS = ("pooled_sum", "pooled_mean", "sequence", "shared")


@dataclass(frozen=True)
class Case:
    optimizer: str
    layout: str
    num_micro_batches: int = 1
    window: str = "once"
    steps: int = STEPS
    schedule: str = "serial"
    method: str = "spectral"
    """Method of clustering."""
    dtype: torch.dtype = torch.float64
    """dtype of the tables; the dense model is float64."""
    replicated: tuple[str, ...] = ()
    """Tables that every rank has."""
    at_owner: tuple[str, ...] = ()
    """Features that are pooled at the owner."""


def features_of(case: Case) -> dict[str, Feature]:
    make = (OPTIMIZERS | SLOW_DECAY)[case.optimizer]
    places = {name: "replicated" if name in case.replicated else "sharded" for name in ("item", "tag")}
    item = Table("item", 5, init.Normal(0.3), make(), dtype=case.dtype, placement=places["item"])
    tag = Table("tag", 3, init.Uniform(-1, 1), make(), NUM_KEYS, dtype=case.dtype, placement=places["tag"])
    where = {name: "owner" if name in case.at_owner else "requester" for name in ("items", "tags")}
    if case.layout in ("pooled_sum", "pooled_mean"):
        mode = case.layout.removeprefix("pooled_")
        tags = Pooled(tag, mode, padding_key=-7, where=where["tags"])
        return {"items": Pooled(item, mode, where=where["items"]), "tags": tags}
    if case.layout == "sequence":
        return {"items": Sequence(item), "tags": Sequence(tag, padding_key=-7)}
    return {"items": Pooled(item, "sum", where=where["items"]), "tags": Sequence(item, padding_key=-7)}


def global_batches(steps: int) -> list[Batch]:
    """Returns batches with ragged lists, some of them empty, repeated keys, per-key weights and padding."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(steps):
        keys = {}
        for name in ("items", "tags"):
            lengths = torch.randint(0, 5, (GLOBAL_BATCH,), generator=generator)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            values = (torch.rand(int(offsets[-1]), generator=generator) ** 3 * NUM_KEYS).long()
            weights = torch.rand(len(values), generator=generator, dtype=torch.float64) + 0.5
            if name == "tags":
                values[torch.rand(len(values), generator=generator) < 0.1] = -7
            keys[name] = Jagged(values, offsets, weights)
        labels = torch.randint(0, 2, (GLOBAL_BATCH,), generator=generator).double()
        batches.append(Batch(keys, {"label": labels}))
    return batches


class SmallModel(nn.Module):
    def __init__(self, dims: Mapping[str, int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.first = nn.Parameter(torch.randn(sum(dims.values()), 6, generator=generator, dtype=torch.float64) * 0.5)
        self.second = nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64))

    def dense(self, parts: list[Tensor], label: Tensor) -> Tensor:
        logit = torch.tanh(torch.cat(parts, dim=1).double() @ self.first) @ self.second
        return F.binary_cross_entropy_with_logits(logit, label, reduction="sum")

    def forward(self, embeddings, inputs) -> Tensor:
        parts = []
        for value in embeddings.values():
            if not isinstance(value, Tensor):  # a sequence: position-weighted sum, so that order matters
                positions = torch.arange(1, 5, dtype=torch.float64, device=value.offsets.device)
                value = (value.padded(4) * positions[:, None]).sum(1)
            parts.append(value)
        return self.dense(parts, inputs["label"])


def make_trainer(world: World | None, case: Case, **options) -> Trainer:
    features = features_of(case)
    model = SmallModel({name: feature.table.dim for name, feature in features.items()})
    model = model.to(world.device if world is not None else "cpu")
    return Trainer(
        model,
        features,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        world=world,
        schedule=case.schedule,
        num_micro_batches=case.num_micro_batches,
        window=case.window,
        clustering=Clustering(case.method),
        seed=3,
        **options,
    )


def on_ranks(size: int, function, *arguments, timeout: float = 50, device: str = "cpu") -> list:
    """Returns function(world, *arguments) of each rank. A world of one runs in this process."""
    if size == 1:
        return [function(World(device=device), *arguments)]
    return run_ranks(size, function, *arguments, timeout=timeout, device=device)


def make_pipeline(world: World, case: Case, batches: list[Batch]) -> Pipeline:
    """Returns a pipeline for a user's own loop."""
    options = {"schedule": case.schedule, "num_micro_batches": case.num_micro_batches, "window": case.window}
    clustering = Clustering(case.method)
    return Pipeline(features_of(case), batches, world=world, clustering=clustering, seed=3, **options)


def share_of(batches: list[Batch], world: World) -> list[Batch]:
    """Returns this rank's part of each global batch. Ranks get unequal parts."""
    bounds = [round(len(batches[0]) * (r / world.size) ** 1.3) for r in range(world.size + 1)]
    return [batch[bounds[world.rank] : bounds[world.rank + 1]] for batch in batches]


def train(world: World, case: Case) -> tuple[str, list[float], dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Returns the digest, losses, dense parameters, and this rank's keys and rows of each table."""
    trainer = make_trainer(world, case)
    result = trainer.fit(share_of(global_batches(case.steps), world))
    rows = {}
    for table in trainer.tables:
        piece = trainer.store.export_piece(table.name, 0, 65536)
        rows[table.name] = (piece.keys, piece.records[:, : table.dim])
    dense = {name: value.cpu().clone() for name, value in trainer.model.state_dict().items()}
    return trainer.digest(), result.losses, dense, rows


class PlainTorch:
    """The same training in one process with plain PyTorch. It shares only the initial rows with the package."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.features = features_of(case)
        self.model = SmallModel({name: feature.table.dim for name, feature in self.features.items()})
        self.dense = torch.optim.Adam(self.model.parameters(), 0.01)
        tables = {feature.table.name: feature.table for feature in self.features.values()}
        self.rows = {name: nn.Parameter(self._initial(table)) for name, table in tables.items()}
        self.state = {name: self._initial_state(rows) for name, rows in self.rows.items()}
        self.num_steps = 0

    def _initial(self, table: Table) -> Tensor:
        from nestpipe.store import DictStore

        oracle = DictStore()
        oracle.create_table(table.spec(seed=3))
        return oracle.gather(table.name, torch.arange(NUM_KEYS), rows_only=True).records

    def _initial_state(self, rows: Tensor) -> dict[str, Tensor]:
        start = {"adagrad": 0.1, "rowwise_adagrad": 0.1}.get(self.case.optimizer, 0.0)
        return {"a": torch.full_like(rows.data, start), "b": torch.zeros_like(rows.data)}

    def embed(self, name: str, jagged: Jagged) -> Tensor:
        feature = self.features[name]
        rows, outs = self.rows[feature.table.name], []
        for sample in range(len(jagged)):
            span = slice(int(jagged.offsets[sample]), int(jagged.offsets[sample + 1]))
            keys, weights = jagged.values[span], jagged.weights[span]
            present = keys != feature.padding_key if feature.padding_key is not None else torch.ones_like(keys).bool()
            vectors = torch.where(present[:, None], F.embedding(keys.clamp(min=0), rows), 0.0)
            if isinstance(feature, Sequence):
                vectors = vectors[:4]
                outs.append((vectors * torch.arange(1, len(vectors) + 1, dtype=torch.float64)[:, None]).sum(0))
                continue
            total = (weights * present).sum()
            pooled = (vectors * weights[:, None]).sum(0)
            outs.append(pooled / total if feature.mode == "mean" and total > 0 else pooled)
        return torch.stack(outs)

    def step(self, batch: Batch) -> float:
        self.num_steps += 1
        self.dense.zero_grad()
        for rows in self.rows.values():
            rows.grad = None
        parts = [self.embed(name, batch.keys[name]) for name in self.features]
        loss = self.model.dense(parts, batch.inputs["label"]) / len(batch)
        loss.backward()
        self.dense.step()
        touched = {name: torch.zeros(NUM_KEYS, dtype=torch.bool) for name in self.rows}
        for name, feature in self.features.items():
            keys = batch.keys[name].values
            touched[feature.table.name][keys[keys >= 0]] = True
        for name, rows in self.rows.items():
            self._update(rows, self.state[name], touched[name])
        return float(loss.detach())

    @torch.no_grad()
    def _update(self, rows: nn.Parameter, state: dict[str, Tensor], touched: Tensor) -> None:
        g = rows.grad[touched] if rows.grad is not None else torch.zeros_like(rows[touched])
        r, a, b = rows[touched], state["a"][touched], state["b"][touched]
        if self.case.optimizer == "sgd":
            r = r - 0.5 * (g + 0.01 * r)
        elif self.case.optimizer == "adagrad":
            a = a + g**2
            r = r - 0.1 * g / (a.sqrt() + 1e-10)
        elif self.case.optimizer == "rowwise_adagrad":
            a = a + (g**2).mean(1, keepdim=True)
            r = r - 0.1 * g / (a.sqrt() + 1e-10)
        elif self.case.optimizer == "adam":
            a, b, t = 0.9 * a + 0.1 * g, 0.999 * b + 0.001 * g**2, self.num_steps
            size = 0.05 / t**0.5 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
            r = r - size * a / (b.sqrt() + 1e-8)
        else:
            a = 0.9 * a + g
            r = r - 0.1 * a
        rows[touched], state["a"][touched], state["b"][touched] = r, a, b
