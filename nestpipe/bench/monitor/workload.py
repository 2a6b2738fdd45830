"""Data and model of the runs that are made slow. Recipes name them, as those of a user's own package."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Dataset
from nestpipe.models.dlrm import DLRM
from nestpipe.recipe.source import ClickSource, HeldOut
from nestpipe.store import NUM_BUCKETS
from nestpipe.store.native.key_ops import hash_keys

FEATURE = "item"
NUM_DENSE = 4
NUM_KEYS = 400_000
KEYS_PER_SAMPLE = 4
READ_SECONDS = 0.01
"""Time in which a healthy disk delivers a batch."""
SLOW_READ_SECONDS = 0.2
HOT_SHARE = 0.5
"""Share of the keys that are drawn from the hot owner's only."""
NUM_PRODUCTS, PRODUCT_SIZE = 60, 256
"""Products of matrices that the model computes, about 20 ms."""
DEVICE_SECONDS = 0.0005
"""Time in which an accelerator would compute, after each product: the model sleeps. So three ranks need less than two
cores, and do not wait for each other's."""
_MIX = 0x9E3779B97F4A7C15


@dataclass
class Trouble:
    """The fault of this process. Each trial sets it before it builds the run."""

    reads_slowly: bool = False
    hot_owner: int | None = None
    num_ranks: int = 1


trouble = Trouble()


class Items(ClickSource):
    """Clicks on lists of items that are drawn evenly, except with a hot owner."""

    num_dense = NUM_DENSE

    def feature_names(self) -> tuple[str, ...]:
        return (FEATURE,)

    def training(self) -> Dataset:
        return _Items(self.config.data.seed)

    def held_out(self, num_samples: int) -> HeldOut | None:
        return None


class _Items(Dataset):
    num_samples = None

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._hot = None if trouble.hot_owner is None else _keys_of(trouble.hot_owner, trouble.num_ranks)

    def samples(self, first: int, count: int) -> Batch:
        if count > 0:
            time.sleep(SLOW_READ_SECONDS if trouble.reads_slowly else READ_SECONDS)
        places = np.arange(first * KEYS_PER_SAMPLE, (first + count) * KEYS_PER_SAMPLE, dtype=np.uint64)
        random = (places + np.uint64(self._seed << 40)) * np.uint64(_MIX)
        random ^= random >> np.uint64(29)
        random *= np.uint64(_MIX)
        keys = ((random >> np.uint64(20)) % np.uint64(NUM_KEYS)).astype(np.int64)
        if self._hot is not None:
            is_hot = (random >> np.uint64(48)) < int(HOT_SHARE * 2**16)
            keys[is_hot] = self._hot[keys[is_hot] % len(self._hot)]
        offsets = torch.arange(count + 1) * KEYS_PER_SAMPLE
        inputs = {"dense": torch.zeros(count, NUM_DENSE), "click": (torch.arange(first, first + count) % 2).float()}
        return Batch({FEATURE: Jagged(torch.from_numpy(keys), offsets)}, inputs)


def _keys_of(owner: int, num_ranks: int) -> NDArray[np.int64]:
    """Returns keys that this rank owns."""
    keys = torch.arange(NUM_KEYS)
    buckets = hash_keys(FEATURE, keys).numpy().view(np.uint64) >> np.uint64(48)
    owned: NDArray[np.int64] = keys.numpy()[buckets.astype(np.int64) * num_ranks // NUM_BUCKETS == owner]
    return owned


class PacedDLRM(DLRM):
    """A small DLRM, which computes some more, and waits as if for an accelerator."""

    def __init__(self, num_dense: int, feature_names: Sequence[str], dim: int, seed: int) -> None:
        super().__init__(num_dense, feature_names, dim, bottom=(8,), top=(8,), seed=seed)

    def predict(self, embeddings: Mapping[str, object], inputs: Mapping[str, Tensor]) -> Tensor:
        matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
        for _ in range(NUM_PRODUCTS):
            matrix @ matrix
            time.sleep(DEVICE_SECONDS)
        return super().predict(embeddings, inputs)
