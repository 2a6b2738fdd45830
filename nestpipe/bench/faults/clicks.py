"""Data and model of the runs that faults hit. Recipes name them, as those of a user's own package."""

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import Dataset
from nestpipe.data.synthetic.clicks import ClickData
from nestpipe.models.dlrm import DLRM
from nestpipe.recipe.sources.synthetic import SyntheticClicks

FEATURES = ("c01", "c03", "c11", "c16")
"""Fields that are kept, two of the user and two of what is shown. A batch has new keys of each."""


class FewClicks(SyntheticClicks):
    """Synthetic clicks with few features and few keys, so that a run takes a second."""

    def feature_names(self) -> tuple[str, ...]:
        return FEATURES

    def _dataset(self, num_samples: int | None) -> Dataset:
        return _Few(ClickData(self.config.data.seed, num_samples, skew=0.8, scale=0.02))


class _Few(Dataset):
    def __init__(self, clicks: ClickData) -> None:
        self._clicks = clicks

    @property
    def num_samples(self) -> int | None:
        return self._clicks.num_samples

    def samples(self, first: int, count: int) -> Batch:
        batch = self._clicks.samples(first, count)
        return Batch({name: batch.keys[name] for name in FEATURES}, batch.inputs)


class NoisyDLRM(DLRM):
    """A DLRM whose loss also depends on all generators of a process, and on a buffer that differs by rank: a checkpoint
    that lacks one of them gives another digest."""

    mean: Tensor

    def __init__(self, num_dense: int, feature_names: Sequence[str], dim: int, seed: int) -> None:
        super().__init__(num_dense, feature_names, dim, bottom=(8,), top=(8,), seed=seed)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(num_dense))
        random.seed(seed)
        np.random.seed(seed)

    def predict(self, embeddings: Mapping[str, object], inputs: Mapping[str, Tensor]) -> Tensor:
        dense = inputs["dense"]
        if self.training and len(dense) > 0:
            self.mean.lerp_(dense.mean(dim=0), random.uniform(0.1, 0.2))
            dense = dense * np.random.uniform(0.9, 1.1)
        return super().predict(embeddings, {**inputs, "dense": self.dropout(dense - self.mean)})
