"""What pages take for granted: names and files that their fragments use, made small. Other pages need nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

import nestpipe
from nestpipe.data.negatives import Negatives
from nestpipe.datasets.generate import generate
from tests.docs.blocks import ROOT

RECIPE = """
[train]
steps = 4
batch_size = 64

[evaluate]
num_samples = 64
"""
NUM_ITEMS = 50


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def encode(self, embeddings: Any, inputs: dict[str, Tensor]) -> Tensor:
        return self.layer(embeddings["user"])  # type: ignore[no-any-return]

    def forward(self, embeddings: Any, inputs: dict[str, Tensor]) -> Tensor:
        return self.encode(embeddings, inputs).square().sum()


def make_trainer(features: dict[str, Any]) -> nestpipe.Trainer:
    return nestpipe.Trainer(Model(), features, dense_optimizer=lambda p: torch.optim.Adam(p, 1e-3))


def batch() -> nestpipe.Batch:
    keys = nestpipe.Jagged.from_lists([[1, 2], [3], [4, 5]])
    return nestpipe.Batch({"user": keys, "history": keys, "target": nestpipe.Jagged.from_lists([[7], [8], [9]])})


def evaluation(folder: Path) -> dict[str, Any]:
    item = nestpipe.Table("item", dim=8)
    features = {"user": nestpipe.Pooled(item), "history": nestpipe.Sequence(item), "target": nestpipe.Sequence(item)}
    trainer = make_trainer(features)
    trainer.fit([batch()] * 2)

    class HeldOut(list[nestpipe.Batch]):
        """A list of batches, which the page also calls."""

        def __call__(self) -> list[nestpipe.Batch]:
            return self

    names = {"trainer": trainer, "held_out": HeldOut([batch()]), "num_items": NUM_ITEMS}
    return {**names, "batches": [batch()] * 100}


def checkpoints(folder: Path) -> dict[str, Any]:
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "examples").symlink_to(ROOT / "examples")
    features = {"user": nestpipe.Pooled(nestpipe.Table("user", dim=8))}
    trainer = make_trainer(features)

    class Batches(list[nestpipe.Batch]):
        """Data with a state, as nestpipe.data.Batches has it."""

        def state(self) -> dict[str, int]:
            return {"position": 0}

        def load_state(self, state: dict[str, int]) -> None:
            assert state == {"position": 0}

    batches = Batches([nestpipe.Batch({"user": batch().keys["user"]})] * 2)
    trainer.fit(batches)
    names = {"trainer": trainer, "nestpipe": nestpipe, "features": features, "world": nestpipe.World()}
    return {**names, "batches": batches, "model": trainer.model, "adam": trainer.optimizer}


def loader(folder: Path) -> dict[str, Any]:
    generate("movielens", folder / "ml-1m", 3000)
    (folder / "recipes").symlink_to(ROOT / "recipes")
    (folder / "logs").mkdir()
    (folder / "histories").mkdir()
    numbers = np.arange(4096)
    lists = pa.array([[i % 7, i % 5] for i in numbers], pa.list_(pa.int64()))
    columns = {"user_id": numbers, "tags": lists, "age": numbers * 0.01, "price": numbers * 0.1}
    pq.write_table(pa.table({**columns, "label": numbers % 2, "w": numbers * 0 + 1.0}), folder / "logs/day-1.parquet")
    events = {"item": pa.array([[1, 2, 3, 4]] * 8), "time_seconds": pa.array([[1, 2, 3, 4]] * 8)}
    pq.write_table(pa.table(events), folder / "histories/users.parquet")
    from nestpipe.data.files.user_histories import UserHistories

    class Short(nestpipe.Trainer):
        """Trains two steps, whatever the page says."""

        def fit(self, batches: Any, steps: int | None = None, *rest: Any, **named: Any) -> Any:
            return super().fit(batches, 2, *rest, **named)

    user, tag = (nestpipe.Table(name, dim=8) for name in ("user", "tag"))
    features = {"user": nestpipe.Pooled(user), "tags": nestpipe.Pooled(tag)}
    trainer = Short(Model(), features, dense_optimizer=lambda p: torch.optim.Adam(p, 1e-3))
    names = {"trainer": trainer, "world": trainer.world, "paths": "histories/*.parquet", "num_items": NUM_ITEMS}
    return {**names, "Negatives": Negatives, "UserHistories": UserHistories}


SURROUNDINGS = {"evaluation.md": evaluation, "checkpoints.md": checkpoints, "loader.md": loader}
