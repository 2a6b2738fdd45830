"""The exact probability of the next item of HistoryData, given everything that a model sees."""

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.data.synthetic.draws import Floats
from nestpipe.data.synthetic.histories import LONG_GAP_SECONDS, HistoryData, Numbers

Truths = NDArray[np.bool_]

MOST_SETS = 20_000
"""Largest number of sets of interests, each of which the oracle weighs."""


class HistoryOracle:
    """Computes the probability of every item to be the target, given the history and all times, the target's included.

    It knows how histories are made (popularity, interests, groups and where items lead), but neither the seed nor the
    user's interests. It infers those: it weighs every set of interests by the probability that a user who has it would
    have had this history, item by item, each time among the items that were new to the user. Exact up to rounding.
    """

    def __init__(self, data: HistoryData) -> None:
        shape = data.shape
        num_sets = comb(shape.num_interests, shape.interests_a_user)
        if num_sets > MOST_SETS:
            raise ValueError(
                f"a user's interests are one of {num_sets} sets, too many to weigh (at most {MOST_SETS}); take fewer "
                "num_interests or interests_a_user"
            )
        self.data = data
        self.sets: Floats = np.zeros((num_sets, shape.num_interests))
        """[sets, interests] 1 for interests in the set, else 0."""
        for row, interests in enumerate(combinations(range(shape.num_interests), shape.interests_a_user)):
            self.sets[row, interests] = 1.0
        self.interest_popularity = np.bincount(data.interests, data.popularity, shape.num_interests)
        cells = data.groups * shape.num_interests + data.interests
        cell_popularity = np.bincount(cells, data.popularity, shape.num_groups * shape.num_interests)
        self.group_popularity = cell_popularity.reshape(shape.num_groups, shape.num_interests) @ self.sets.T
        """[groups, sets] popularity of the items of a group that are of a set's interests."""
        self.total = float(data.popularity.sum())

    def probabilities(self, batch: Batch) -> Tensor:
        """Returns [n, num_items] float64. Items of the history have probability 0, and rows add up to 1."""
        history, times = batch.keys["history"], batch.inputs["times"].numpy()
        values, offsets = history.values.numpy(), history.offsets.tolist()
        rows = np.zeros((len(history), self.data.shape.num_items))
        for row, gaps, first, end in zip(rows, np.diff(times), offsets, offsets[1:], strict=False):
            begins = np.concatenate([[True], gaps[: end - first] >= LONG_GAP_SECONDS[0]])
            row[:] = self._probabilities(values[first:end], begins)
        return torch.from_numpy(rows)

    def scores(self, batch: Batch) -> Tensor:
        """Returns the probabilities, to rank by."""
        return self.probabilities(batch)

    def _probabilities(self, items: Numbers, begins: Truths) -> Floats:
        """Returns [num_items]. begins: whether a session begins at each place of the history and at the target's."""
        data, ways = self.data, self._ways(items, begins)
        weights = self._weights(items, ways)
        by_interest = ways.interest[-1] * (weights @ self.sets)
        by_following = (weights * ways.follow[-1]) @ self.sets
        leads = data.groups == ways.leads_to[-1]
        chance = ways.popular[-1] * weights.sum() + (by_interest / self.interest_popularity)[data.interests]
        probabilities: Floats = data.popularity * (chance + leads * by_following[data.interests])
        probabilities[items] = 0.0
        return probabilities

    def _ways(self, items: Numbers, begins: Truths) -> "_Ways":
        shape, left = self.data.shape, np.where(begins, 1 - self.data.shape.follow, 1.0)
        leads_to = np.concatenate([[0], self.data.leads_to[items]])
        return _Ways(
            follow=np.where(begins, 0.0, shape.follow)[:, None] / self.group_popularity[leads_to],
            interest=shape.interest / left / shape.interests_a_user,
            popular=(1 - shape.follow - shape.interest) / left / self.total,
            leads_to=leads_to,
        )

    def _weights(self, items: Numbers, ways: "_Ways") -> Floats:
        """Returns weights of the sets: their probabilities given the history, divided by that of a new item."""
        data, n = self.data, len(items)
        interests, popularity = data.interests[items], data.popularity[items]
        leads = data.groups[items] == ways.leads_to[:, None]
        had = np.tri(n + 1, n, -1) * popularity
        own = np.eye(data.shape.num_interests)[interests]
        had_before = ways.popular * had.sum(axis=1)
        had_of_interests = ways.interest[:, None] * ((had @ own / self.interest_popularity) @ self.sets.T)
        had_of_following = ways.follow * ((had * leads) @ own @ self.sets.T)
        is_new = 1 - had_before[:, None] - had_of_interests - had_of_following
        """[places, sets] probability of an item that the user did not have yet."""
        by_interest = (ways.interest[:n] / self.interest_popularity[interests])[:, None]
        by_following = ways.follow[:n] * leads.diagonal()[:, None]
        chance = ways.popular[:n, None] + self.sets.T[interests] * (by_interest + by_following)
        evidence = np.log(chance / is_new[:n]).sum(axis=0)  # without the popularity, which is the same for all sets
        weights = np.exp(evidence - evidence.max())
        normalised: Floats = weights / weights.sum() / is_new[n]
        return normalised


@dataclass(frozen=True)
class _Ways:
    """Weight of a unit of popularity at each place of a history and at the target's, by the way of drawing an item."""

    follow: Floats
    """[places, sets] for items of the set's interests, in the group that the item before leads to."""
    interest: Floats
    """[places] for items of the set's interests, times the popularity of the interest."""
    popular: Floats
    """[places] for all items."""
    leads_to: Numbers
    """[places] the group that the previous item leads to; arbitrary at the first place, where a session begins."""
