"""A synthetic click log."""

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Dataset, check_positions
from nestpipe.data.synthetic.draws import Floats, Words, normal, stream, streams, zipf_quantiles, zipf_values

NUM_DENSE = 13
# The first 10 fields describe the user, the others what is shown.
NUM_VALUES = (
    *(400_000, 100_000, 20_000, 3_000, 500, 200, 60, 24, 12, 10),
    *(600_000, 250_000, 80_000, 30_000, 12_000, 6_000, 2_500, 1_500, 800, 400, 150, 100, 50, 30, 15, 10),
)
NUM_USER_FIELDS = 10
BLOCK, SESSIONS = 1024, 256
PAIRS = ((3, 16), (4, 18), (5, 20), (6, 21), (7, 22), (8, 24))


class ClickData(Dataset):
    """Samples with 13 dense features, 26 sparse features of one key each, and a click.

    Sparse: `c00` .. `c25`. Field f has NUM_VALUES[f] * scale values (at least 10), Zipf distributed with exponent
    `skew`. The key of a value is a 63-bit hash of field and value, so that all fields may share a table. Each block of
    1024 samples has 256 sessions, and a sample belongs to any of them. The samples of a session, 4 on average, share
    the keys of the user's fields, c00 .. c09.

    Dense: `dense` [n, 13], each nearly normal (a sum of four uniform numbers), mean 0, standard deviation 1.

    Click: `click_probability` = sigmoid(BIAS + a hidden effect of each key + a hidden linear function of the dense
    features + for each of PAIRS the dot product of two hidden vectors of 4 elements, one for each of its keys). All are
    nearly normal: effects with standard deviation KEY_STRENGTH * NUM_VALUES[f] ** -0.125, stronger where keys are
    frequent, coefficients with DENSE_STRENGTH, products with PAIR_STRENGTH. `click` is 1 with that probability, so no
    model can predict better than it. With all defaults a quarter of the samples is clicked, and the probability itself
    has an AUC of 0.83 and a normalised entropy of 0.74.

    The seed draws the samples. Keys and hidden effects are the same for every seed, so samples of another seed, or at
    other positions, are a test set.
    """

    num_samples: int | None = None
    feature_names = tuple(f"c{field:02}" for field in range(len(NUM_VALUES)))
    BIAS = -1.5
    KEY_STRENGTH = 0.5
    DENSE_STRENGTH = 0.15
    PAIR_STRENGTH = 0.4

    def __init__(self, seed: int = 0, num_samples: int | None = None, skew: float = 1.05, scale: float = 1.0) -> None:
        if num_samples is not None and num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}, must be at least 0, or None for endless data")
        if skew < 0 or scale <= 0:
            raise ValueError(f"skew is {skew}, must be at least 0; scale is {scale}, must be above 0")
        self.seed = seed
        self.num_samples = num_samples
        self.num_values = tuple(max(10, round(number * scale)) for number in NUM_VALUES)
        self._quantiles = np.stack([zipf_quantiles(number, skew) for number in self.num_values])
        self._dense_effects = self.DENSE_STRENGTH * normal(stream("dense effect", 0, np.arange(NUM_DENSE)))

    def samples(self, first: int, count: int) -> Batch:
        check_positions(first, count, self.num_samples)
        positions = np.arange(first, first + count, dtype=np.uint64)
        keys = self._keys(positions)
        dense = normal(streams([f"dense {i}" for i in range(NUM_DENSE)], self.seed, positions))
        probability = self._probability(keys, dense)
        click = (stream("click", self.seed, positions) >> 40) * 2.0**-24 < probability
        offsets = torch.arange(count + 1)
        return Batch(
            {name: Jagged(torch.from_numpy(row), offsets) for name, row in zip(self.feature_names, keys, strict=True)},
            {
                "dense": torch.from_numpy(np.ascontiguousarray(dense.T, dtype=np.float32)),
                "click": torch.from_numpy(click.astype(np.float32)),
                "click_probability": torch.from_numpy(probability),
            },
        )

    def _keys(self, positions: Words) -> NDArray[np.int64]:
        """[fields, samples]"""
        sessions = positions // BLOCK * SESSIONS + stream("session", self.seed, positions) % SESSIONS
        fields = np.arange(len(NUM_VALUES))
        units = np.where(fields[:, None] < NUM_USER_FIELDS, sessions, positions)
        words = streams([f"value {field}" for field in fields], self.seed, units)
        values = zipf_values(self._quantiles, words) + (fields.astype(np.uint64) << 32)[:, None]
        return (stream("key", 0, values) >> 1).view(np.int64)

    def _probability(self, keys: NDArray[np.int64], dense: Floats) -> NDArray[np.float32]:
        """Adds field by field, because the order of numpy's reductions may depend on the number of samples."""
        words = keys.view(np.uint64)
        logit = np.full(words.shape[1], self.BIAS)
        effects = normal(stream("key effect", 0, words))
        for effect, number in zip(effects, NUM_VALUES, strict=True):
            logit += self.KEY_STRENGTH * number**-0.125 * effect
        for strength, values in zip(self._dense_effects, dense, strict=True):
            logit += strength * values
        for one, other in PAIRS:
            logit += self.PAIR_STRENGTH * _dot(*stream("key vector", 0, words[[one, other]]))
        probability: Floats = 1.0 / (1.0 + np.exp(-logit))
        return probability.astype(np.float32)


def _dot(one: Words, other: Words) -> Floats:
    """Returns standardised dot products of four 16-bit numbers each. They are exact in any order of summation."""
    products = one.view(np.int16).astype(np.float64) * other.view(np.int16)
    total: Floats = products.reshape(-1, 4).sum(axis=1)
    return total * (1.5 / 2.0**30)
