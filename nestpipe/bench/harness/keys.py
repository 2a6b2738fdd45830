"""Zipf-distributed keys."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SKEW = 1.05


def zipf_ranks(num_ranks: int, shape: int | tuple[int, ...], generator: np.random.Generator) -> NDArray[np.int64]:
    """Draws ranks 0 .. num_ranks - 1, rank r with probability proportional to (r + 1)^-SKEW."""
    weights = np.cumsum(np.arange(1, num_ranks + 1, dtype=np.float64) ** -SKEW)
    return np.asarray(np.searchsorted(weights, generator.random(shape) * weights[-1]), dtype=np.int64)


def zipf_keys(num_keys: int, shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
    """Draws keys 0 .. num_keys - 1. A random permutation says which key has which rank."""
    drawn = zipf_ranks(num_keys, shape, generator)
    return torch.from_numpy(generator.permutation(num_keys)[drawn])
