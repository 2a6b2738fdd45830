"""Synthetic behaviour sequences: any sample can be made directly, from the seed and its position."""

import numpy as np
import torch

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Dataset
from nestpipe.data.draws import Words, normal, stream, zipf_quantiles, zipf_values

NUM_ITEMS = 10_000_000
NUM_INTERESTS = 64
INTERESTS_A_SAMPLE = 3
INTEREST_SHARE = 0.7
SKEW = 1.05
ITEMS_AN_INTEREST = 12_000
MEDIAN_LENGTH = 50
SPREAD = 0.7
MAX_LENGTH = 512


class SequenceData(Dataset):
    """One feature, `history`: the items that a user has seen.

    Items are numbered by popularity, and item i is of interest i mod NUM_INTERESTS.

    """

    num_samples: int | None = None

    def __init__(self, seed: int = 0, num_samples: int | None = None, **kw) -> None:
        if num_samples is not None and num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}, must be at least 0, or None for endless data")
        self.seed = seed
        self.num_samples = num_samples
        g = globals()
        for k, v in kw.items():
            g[k] = v
        self._all_items = zipf_quantiles(NUM_ITEMS, SKEW)
        self._of_interest = zipf_quantiles(ITEMS_AN_INTEREST, SKEW)

    def samples(self, first: int, count: int) -> Batch:
        positions = np.arange(first, first + count, dtype=np.uint64)
        lengths = self._lengths(positions)
        offsets = np.concatenate([[0], lengths.cumsum()])
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        owner = np.repeat(positions, lengths)
        items = self._items(owner, owner * np.uint64(MAX_LENGTH) + place.astype(np.uint64))
        keys = (stream("item key", 0, items) >> 1).view(np.int64)
        return Batch({"history": Jagged(torch.from_numpy(keys), torch.from_numpy(offsets))})

    def _lengths(self, positions):
        lengths = MEDIAN_LENGTH * np.exp(SPREAD * normal(stream("length", self.seed, positions)))
        return np.clip(lengths.astype(np.int64), 1, MAX_LENGTH)

    def _items(self, samples: Words, units: Words) -> Words:
        choice = stream("choice", self.seed, units)
        words = stream("item", self.seed, units)
        which = samples * np.uint64(INTERESTS_A_SAMPLE) + choice % np.uint64(INTERESTS_A_SAMPLE)
        interest = stream("interest", self.seed, which) % np.uint64(NUM_INTERESTS)
        of_interest = zipf_values(self._of_interest, words) * np.uint64(NUM_INTERESTS) + interest
        is_of_interest = (choice >> 40) * 2.0**-24 < INTEREST_SHARE
        return np.where(is_of_interest, of_interest, zipf_values(self._all_items, words))
