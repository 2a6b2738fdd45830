"""Negatives: a feature whose keys are drawn uniformly from a corpus when a batch is read."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Dataset, Fingerprint, fingerprint_of
from nestpipe.data.synthetic.draws import following, stream

NEGATIVES_PER = ("position", "sample")


class Negatives:
    """Draws num_negatives keys for each key of a history, or for each sample.

    All keys of the corpus are equally likely, the next item included, which the loss leaves out. The draws depend on
    the seed and the sample's position alone. corpus: the keys; a number n stands for the keys 0 .. n - 1.
    """

    def __init__(self, corpus: Tensor | int, num_negatives: int = 128, per: str = "position", seed: int = 0) -> None:
        num_keys = corpus if isinstance(corpus, int) else len(corpus)
        if num_keys < 1 or num_negatives < 1:
            raise ValueError(
                f"the corpus has {num_keys} keys and num_negatives is {num_negatives}; both must be at least 1"
            )
        if isinstance(corpus, Tensor) and (corpus.dtype != torch.int64 or corpus.dim() != 1):
            raise ValueError(
                f"the corpus must be a 1-dimensional int64 tensor, got {corpus.dtype} {list(corpus.shape)}"
            )
        if per not in NEGATIVES_PER:
            raise ValueError(f"negatives are drawn per 'position' or per 'sample', not per {per!r}")
        self.corpus = None if isinstance(corpus, int) else corpus
        self.num_keys = num_keys
        self.num_negatives = num_negatives
        self.per = per
        self.seed = seed

    def draw(self, positions: NDArray[np.int64], history: Jagged) -> Jagged:
        """Draws for the samples at these positions, which have these histories."""
        num_draws = history.lengths if self.per == "position" else torch.ones_like(history.lengths)
        counts = num_draws * self.num_negatives
        words = following(stream("negatives", self.seed, positions), counts.numpy())
        # 53 bits are exact in double, and a corpus has far fewer keys, so no key is favoured by more than 2^-20.
        drawn = torch.from_numpy(((words >> 11) * (self.num_keys * 2.0**-53)).astype(np.int64))
        keys = drawn if self.corpus is None else self.corpus[drawn]
        return Jagged(keys, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


class WithNegatives(Dataset):
    """A dataset with an additional feature `negatives`, drawn for the feature `history`."""

    def __init__(
        self,
        dataset: Dataset,
        corpus: Tensor | int,
        num_negatives: int = 128,
        per: str = "position",
        seed: int = 0,
        history: str = "history",
        name: str = "negatives",
    ) -> None:
        self.dataset = dataset
        self.negatives = Negatives(corpus, num_negatives, per, seed)
        self.history = history
        self.name = name

    @property
    def num_samples(self) -> int | None:
        return self.dataset.num_samples

    def fingerprint(self) -> Fingerprint:
        return fingerprint_of(self.dataset)

    def samples(self, first: int, count: int) -> Batch:
        batch = self.dataset.samples(first, count)
        if self.name in batch.keys or self.history not in batch.keys:
            raise ValueError(
                f"negatives need a feature {self.history!r} and add a feature {self.name!r}; there are "
                f"{sorted(batch.keys)}"
            )
        drawn = self.negatives.draw(np.arange(first, first + count), batch.keys[self.history])
        return replace(batch, keys={**batch.keys, self.name: drawn})
