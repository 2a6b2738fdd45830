"""A package of a user's own: what a recipe can name, registered by the entry points of its pyproject.toml."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe import Batch
from nestpipe.data.dataset import Dataset
from nestpipe.data.synthetic.clicks import NUM_DENSE, ClickData
from nestpipe.optim import RowOptimizer
from nestpipe.recipe.source import ClickSource, HeldOut


class TinyRanker(nn.Module):
    """Logistic regression on pooled embeddings, with a hidden layer."""

    learns_from = "clicks"

    def __init__(self, feature_names: Sequence[str], dim: int, hidden: int = 4, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.feature_names = tuple(feature_names)
        self.hidden = nn.Parameter(torch.randn(len(self.feature_names) * dim, hidden, generator=generator) / 8)
        self.out = nn.Parameter(torch.randn(hidden, generator=generator) / 8)

    def forward(self, embeddings: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        logits = self.predict(embeddings, inputs)
        return F.binary_cross_entropy_with_logits(logits, inputs["click"].to(logits.dtype), reduction="sum")

    def predict(self, embeddings: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([embeddings[name] for name in self.feature_names], 1) @ self.hidden @ self.out


class TinyClicks(ClickSource):
    """Synthetic clicks of three features."""

    num_dense = NUM_DENSE

    def training(self) -> Dataset:
        return FirstFeatures(self.config.data.seed, self.config.data.num_samples)

    def held_out(self, num_samples: int) -> HeldOut:
        start = int(self.config.data.args["held_out"])
        return HeldOut(FirstFeatures(self.config.data.seed, start + num_samples), start)

    def feature_names(self) -> tuple[str, ...]:
        return FirstFeatures.feature_names[:3]


class FirstFeatures(ClickData):
    def samples(self, first: int, count: int) -> Batch:
        batch = super().samples(first, count)
        return Batch({name: batch.keys[name] for name in self.feature_names[:3]}, batch.inputs)


class SignSGD(RowOptimizer):
    """Steps of equal size: row -= lr * sign(g)."""

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        rows.sub_(gradient.sign(), alpha=lr)


class MeanPrediction:
    """Mean of the predicted logits."""

    method = "predict"

    def __init__(self) -> None:
        self.total = torch.zeros(2, dtype=torch.int64)

    def update(self, outputs: Tensor, inputs: Mapping[str, Tensor], keys: Mapping[str, object]) -> None:
        self.total += torch.tensor([int((outputs.double() * 2**20).round().sum()), len(outputs)])

    def compute(self, channel) -> dict[str, float]:
        channel.all_reduce_sum(self.total)
        return {"mean_prediction": float(self.total[0]) / 2**20 / max(1, int(self.total[1]))}
