"""What counting tells about the next item: how popular an item is, and how often it came after the last one."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Dataset

SAMPLES_AT_A_TIME = 8192
BACK_OFF = 10.0
"""times of seeing an item that the popularity of the next one counts for"""


class Guess(Protocol):
    def scores(self, batch: Batch) -> Tensor:
        """[n, num_items] the higher, the likelier; items of the history count as any other."""


@dataclass(frozen=True)
class Popularity:
    counts: Tensor
    """[num_items] float64: how often an item came next"""

    def scores(self, batch: Batch) -> Tensor:
        return self.counts.expand(len(batch), -1)


@dataclass(frozen=True)
class Bigram:
    """P(next | last) = (times next came after last + BACK_OFF * share of next) / (times of last + BACK_OFF).

    A sample without history is left with the popularity.
    """

    popularity: Popularity
    pairs: Tensor
    """ascending: item * num_items + the item after it"""
    times: Tensor
    """[pairs] float64"""

    def scores(self, batch: Batch) -> Tensor:
        num_items = len(self.popularity.counts)
        last, has_last = last_items(batch.keys["history"])
        first = torch.searchsorted(self.pairs, last * num_items)
        counts = torch.searchsorted(self.pairs, (last + 1) * num_items) - first
        samples = torch.arange(len(last)).repeat_interleave(counts)
        places = torch.arange(len(samples)) + (first - counts.cumsum(0) + counts).repeat_interleave(counts)
        shares = self.popularity.counts / self.popularity.counts.sum().clamp(min=1)
        scores = (BACK_OFF * shares).repeat(len(last), 1)
        scores[samples, self.pairs[places] % num_items] += self.times[places] * has_last[samples]
        return scores  # what the last item divides all of them by makes no difference


def count(data: Dataset, num_items: int, first: int, num_samples: int) -> tuple[Popularity, Bigram]:
    """From these samples, targets included; keys are 0 .. num_items - 1."""
    popularity = torch.zeros(num_items, dtype=torch.float64)
    pairs, times = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    for start in range(first, first + num_samples, SAMPLES_AT_A_TIME):
        batch = data.samples(start, min(SAMPLES_AT_A_TIME, first + num_samples - start))
        items, following = transitions(batch)
        popularity += torch.bincount(following, minlength=num_items)
        found, num_found = (items * num_items + following).unique(return_counts=True)
        pairs, which = torch.cat([pairs, found]).unique(return_inverse=True)
        summed = torch.zeros(len(pairs), dtype=torch.float64)
        times = summed.index_add_(0, which, torch.cat([times, num_found.double()]))
    return Popularity(popularity), Bigram(Popularity(popularity), pairs, times)


def transitions(batch: Batch) -> tuple[Tensor, Tensor]:
    """The items of all histories, and the item that comes after each."""
    history, target = batch.keys["history"], batch.keys["target"].values
    following = torch.cat([history.values[1:], history.values[:1]])
    has_last = history.lengths > 0
    following[history.offsets[1:][has_last] - 1] = target[has_last]
    return history.values, following


def last_items(history: Jagged) -> tuple[Tensor, Tensor]:
    """Of each sample, and whether there is one; 0 where there is none."""
    has_last = history.lengths > 0
    last = torch.zeros(len(history), dtype=torch.int64)
    last[has_last] = history.values[history.offsets[1:][has_last] - 1]
    return last, has_last


def ranks_of_targets(scores: Tensor, batch: Batch) -> Tensor:
    """[n] 1 + items that score higher + items of equal score with a smaller key, without those of the history."""
    history, target = batch.keys["history"], batch.keys["target"].values[:, None]
    of_target = scores.gather(1, target)
    is_tie = (scores == of_target) & (torch.arange(scores.shape[1]) < target)
    is_better = (scores > of_target) | is_tie
    is_better[torch.arange(len(target)).repeat_interleave(history.lengths), history.values] = False
    return 1 + is_better.sum(1)
