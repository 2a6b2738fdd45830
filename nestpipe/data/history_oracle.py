"""What can be known about the next item of HistoryData: its exact probability, given everything a model sees."""

from itertools import combinations
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.data.draws import Floats
from nestpipe.data.histories import LONG_GAP_SECONDS, HistoryData, Numbers

Truths = NDArray[np.bool_]

MOST_SETS = 20_000
"""sets of interests that a user may have, each of which the oracle weighs"""


class HistoryOracle:
    """The probability of every item to be the target, given the history and all times, the target's included.

    It knows how histories are made: popularity, interests, groups and where items lead; not the seed, nor the user's
    interests. Those it infers: it weighs every set of interests by the probability with which a user that has it would
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
        """[sets, interests] 1 for those in the set"""
        for row, interests in enumerate(combinations(range(shape.num_interests), shape.interests_a_user)):
            self.sets[row, interests] = 1.0
        self.of_interest = np.bincount(data.interests, data.popularity, shape.num_interests)
        cells = data.groups * shape.num_interests + data.interests
        of_cell = np.bincount(cells, data.popularity, shape.num_groups * shape.num_interests)
        self.of_group = of_cell.reshape(shape.num_groups, shape.num_interests) @ self.sets.T
        """[groups, sets] popularity of the items of a group that are of the interests of a set"""
        self.total = float(data.popularity.sum())

    def probabilities(self, batch: Batch) -> Tensor:
        """[n, num_items] float64: of each item to be the target; 0 for those of the history; rows add up to 1."""
        history, times = batch.keys["history"], batch.inputs["times"].numpy()
        values, offsets = history.values.numpy(), history.offsets.tolist()
        rows = np.zeros((len(history), self.data.shape.num_items))
        for row, gaps, first, end in zip(rows, np.diff(times), offsets, offsets[1:], strict=False):
            begins = np.concatenate([[True], gaps[: end - first] >= LONG_GAP_SECONDS[0]])
            row[:] = self._of_one(values[first:end], begins)
        return torch.from_numpy(rows)

    def _of_one(self, items: Numbers, begins: Truths) -> Floats:
        """Places of the history and behind it the target's; begins: whether a session begins there."""
        data, shape = self.data, self.data.shape
        follow = np.where(begins, 0.0, shape.follow)
        scale = np.where(begins, 1 - shape.follow, 1.0)
        interest, popular = shape.interest / scale / shape.interests_a_user, (1 - shape.follow - shape.interest) / scale
        leads_to = np.concatenate([[0], data.leads_to[items]])
        following = follow[:, None] / self.of_group[leads_to]
        """[places, sets] what an item that the one before leads to has for each unit of popularity"""

        own = np.eye(shape.num_interests)[data.interests[items]]
        had = np.tri(len(begins), len(items), -1) * data.popularity[items]
        led = data.groups[items] == leads_to[:, None]
        mass_of_interest = (had @ own) / self.of_interest @ self.sets.T
        mass_of_following = ((had * led) @ own) @ self.sets.T
        is_new = 1 - (popular * had.sum(axis=1) / self.total)[:, None]
        is_new = is_new - interest[:, None] * mass_of_interest - following * mass_of_following
        """[places, sets] probability of an item that the user did not have"""

        n = len(items)
        fits = self.sets.T[data.interests[items]]
        chance = interest[:n, None] / self.of_interest[data.interests[items], None] + following[:n] * led.diagonal()[:, None]
        chance = popular[:n, None] / self.total + fits * chance
        evidence = np.log(chance / is_new[:n]).sum(axis=0)
        weights = np.exp(evidence - evidence.max())
        weights /= weights.sum() * is_new[n]

        by_interest = interest[n] * (weights @ self.sets) / self.of_interest
        by_following = (weights * following[n]) @ self.sets
        factor = popular[n] / self.total * weights.sum() + by_interest[data.interests]
        factor += (data.groups == leads_to[n]) * by_following[data.interests]
        probabilities: Floats = data.popularity * factor
        probabilities[items] = 0.0
        return probabilities
