"""Baselines for the next item, by counting: its popularity, and how often it came after the last item."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Dataset

SAMPLES_AT_A_TIME = 8192
BACK_OFF = 10.0
"""Weight of an item's popularity against bigram counts, in occurrences of the last item."""


class Guess(Protocol):
    def scores(self, batch: Batch) -> Tensor:
        """Returns [n, num_items], higher for likelier items. Items of the history are not treated specially."""


@dataclass(frozen=True)
class Popularity:
    counts: Tensor
    """[num_items] float64: how often each item came next."""

    def scores(self, batch: Batch) -> Tensor:
        return self.counts.expand(len(batch), -1)


@dataclass(frozen=True)
class Bigram:
    """P(next | last) = (times next came after last + BACK_OFF * share of next) / (times of last + BACK_OFF).

    A sample without history gets the popularity.
    """

    popularity: Popularity
    pairs: Tensor
    """[pairs] item * num_items + the item after it, ascending."""
    times: Tensor
    """[pairs] float64: how often each pair occurred."""

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
        return scores  # the divisor is the same for all items, so it is left out


def count(data: Dataset, num_items: int, first: int, num_samples: int) -> tuple[Popularity, Bigram]:
    """Counts these samples, targets included. Keys are 0 .. num_items - 1."""
    popularity = torch.zeros(num_items, dtype=torch.float64)
    pairs, times = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    for start in range(first, first + num_samples, SAMPLES_AT_A_TIME):
        batch = data.samples(start, min(SAMPLES_AT_A_TIME, first + num_samples - start))
        items, following = transitions(batch)
        popularity += torch.bincount(following, minlength=num_items)
        new_pairs, new_times = (items * num_items + following).unique(return_counts=True)
        pairs, which = torch.cat([pairs, new_pairs]).unique(return_inverse=True)
        summed = torch.zeros(len(pairs), dtype=torch.float64)
        times = summed.index_add_(0, which, torch.cat([times, new_times.double()]))
    return Popularity(popularity), Bigram(Popularity(popularity), pairs, times)


def transitions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the items of all histories, and the item that comes after each."""
    history, target = batch.keys["history"], batch.keys["target"].values
    following = torch.cat([history.values[1:], history.values[:1]])
    has_last = history.lengths > 0
    following[history.offsets[1:][has_last] - 1] = target[has_last]
    return history.values, following


def last_items(history: Jagged) -> tuple[Tensor, Tensor]:
    """Returns the last item of each sample, or 0 if it has none, and whether it has one."""
    has_last = history.lengths > 0
    last = torch.zeros(len(history), dtype=torch.int64)
    last[has_last] = history.values[history.offsets[1:][has_last] - 1]
    return last, has_last


def ranks_of_targets(scores: Tensor, batch: Batch) -> Tensor:
    """Returns [n] 1 + items outside the history that score higher, or equally high with a smaller key."""
    history, target = batch.keys["history"], batch.keys["target"].values[:, None]
    target_score = scores.gather(1, target)
    is_tie = (scores == target_score) & (torch.arange(scores.shape[1]) < target)
    is_better = (scores > target_score) | is_tie
    is_better[torch.arange(len(target)).repeat_interleave(history.lengths), history.values] = False
    return 1 + is_better.sum(1)
