"""Synthetic behaviour sequences."""

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Dataset, check_positions
from nestpipe.data.synthetic.draws import Words, normal, stream, zipf_quantiles, zipf_values

NUM_ITEMS = 10_000_000
SKEW = 1.05
NUM_INTERESTS = 64
ITEMS_AN_INTEREST = 12_000
INTERESTS_A_SAMPLE = 3
INTEREST_SHARE = 0.7
MEDIAN_LENGTH = 50
LENGTH_SPREAD = 0.7
MAX_LENGTH = 512


class SequenceData(Dataset):
    """One user for each sample, with one sparse feature, `history`: the items that the user has seen.

    Lengths are lognormal: MEDIAN_LENGTH times e to the power of LENGTH_SPREAD times a nearly normal number, rounded
    down, at least 1 and at most MAX_LENGTH.

    Items are numbered 0 .. NUM_ITEMS - 1 by popularity, and item i is of interest i modulo NUM_INTERESTS. A sample has
    INTERESTS_A_SAMPLE interests, each drawn evenly, so that some coincide. With probability INTEREST_SHARE an item of
    the sequence is one of the ITEMS_AN_INTEREST most popular items of one of these interests, Zipf distributed with
    exponent SKEW; otherwise it is any item, Zipf distributed with exponent SKEW over all of them. Items may repeat. The
    key of an item is a 63-bit hash of its number.

    The seed draws the samples; keys are the same for every seed.
    """

    num_samples: int | None = None
    feature_names = ("history",)

    def __init__(self, seed: int = 0, num_samples: int | None = None) -> None:
        if num_samples is not None and num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}, must be at least 0, or None for endless data")
        self.seed = seed
        self.num_samples = num_samples
        self._all_items = zipf_quantiles(NUM_ITEMS, SKEW)
        self._items_of_interest = zipf_quantiles(ITEMS_AN_INTEREST, SKEW)

    def samples(self, first: int, count: int) -> Batch:
        check_positions(first, count, self.num_samples)
        positions = np.arange(first, first + count, dtype=np.uint64)
        lengths = self._lengths(positions)
        offsets = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        items = self._items(np.repeat(positions, lengths), place.astype(np.uint64))
        keys = (stream("item key", 0, items) >> 1).view(np.int64)
        return Batch({"history": Jagged(torch.from_numpy(keys), torch.from_numpy(offsets))})

    def _lengths(self, positions: Words) -> NDArray[np.int64]:
        lengths = MEDIAN_LENGTH * np.exp(LENGTH_SPREAD * normal(stream("length", self.seed, positions)))
        return np.clip(lengths.astype(np.int64), 1, MAX_LENGTH)

    def _items(self, positions: Words, place: Words) -> Words:
        """Returns the item at a place of the sequence of each sample, given by its position."""
        units = positions * np.uint64(MAX_LENGTH) + place
        choice = stream("choice", self.seed, units)
        words = stream("item", self.seed, units)
        which = choice % np.uint64(INTERESTS_A_SAMPLE)
        interest = stream("interest", self.seed, positions * np.uint64(INTERESTS_A_SAMPLE) + which)
        interest_items = zipf_values(self._items_of_interest, words) * np.uint64(NUM_INTERESTS)
        interest_items += interest % np.uint64(NUM_INTERESTS)
        is_of_interest = (choice >> 40) * 2.0**-24 < INTEREST_SHARE
        return np.where(is_of_interest, interest_items, zipf_values(self._all_items, words))
