"""Synthetic histories that a model can learn: users have interests, items lead to others, sessions begin and end."""

from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Dataset, check_positions
from nestpipe.data.synthetic.draws import Floats, Words, normal, stream, uniform

Numbers = NDArray[np.int64]

SHORT_GAP_SECONDS = (5, 600)
LONG_GAP_SECONDS = (4 * 3600, 10 * 86400)
START_SECONDS = 30 * 86400
ATTEMPTS = 4
"""Candidates drawn at a time; the first that is not in the history is used."""


@dataclass(frozen=True)
class HistoryShape:
    """The parameters of HistoryData, with their meaning."""

    num_items: int = 2000
    """Number of items; their keys are 0 .. num_items - 1, by popularity."""
    skew: float = 0.8
    """An item's popularity is (its number + 1) to the power of -skew."""
    num_interests: int = 20
    """Item i is of interest i modulo num_interests."""
    interests_a_user: int = 3
    """Number of distinct interests of a user; all sets are equally likely."""
    num_groups: int = 25
    """Item i is in group (i // num_interests) modulo num_groups, and leads to a group that a hash of i names."""
    follow: float = 0.6
    """Within a session: probability of an item of the user's interests that the previous item leads to."""
    interest: float = 0.25
    """Within a session: probability of an item of one of the user's interests."""
    new_session: float = 0.15
    """Probability that an item begins a session; the first item always does."""
    median_length: float = 20
    """Median length of a history, before it is cut at max_length."""
    length_spread: float = 0.5
    """Standard deviation of the logarithm of the length."""
    max_length: int = 32
    """Largest number of items of a history."""

    def __post_init__(self) -> None:
        for name in ("num_items", "num_interests", "interests_a_user", "num_groups", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        for name in ("follow", "interest", "new_session"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be a probability")
        if self.follow + self.interest >= 1:
            raise ValueError(
                f"follow + interest is {self.follow + self.interest}, must be below 1: the rest is the probability of "
                "any popular item, without which a user could run out of items"
            )
        if self.skew < 0 or self.length_spread < 0 or self.median_length < 1:
            raise ValueError(
                f"skew is {self.skew} and length_spread is {self.length_spread}, must be at least 0; median_length is "
                f"{self.median_length}, must be at least 1"
            )
        if self.max_length >= 2**12:
            raise ValueError(f"max_length is {self.max_length}, must be below {2**12}")
        if self.interests_a_user > self.num_interests:
            raise ValueError(
                f"interests_a_user is {self.interests_a_user}, but there are num_interests = {self.num_interests}"
            )
        if self.num_items < self.num_interests * self.num_groups or self.num_items < 2 * self.max_length:
            raise ValueError(
                f"num_items is {self.num_items}, must be at least num_interests * num_groups = "
                f"{self.num_interests * self.num_groups} and at least twice max_length = {self.max_length}"
            )


class HistoryData(Dataset):
    """One user for each sample: `history`, up to max_length items, `target`, the item that follows, and `times`.

    HistoryShape has the parameters. An item begins a session or continues one. Within a session it is drawn in one of
    three ways, always by popularity: with probability `follow` from the items of the user's interests in the group that
    the previous item leads to; with probability `interest` from one of the user's interests, all equally likely;
    otherwise from all items. At the beginning of a session the first way is left out, and the other two keep their
    proportion. An item that the user already had is drawn again, in any way, so that no item repeats and the target is
    never in the history.

    Lengths of histories are lognormal: median_length times e to the power of length_spread times a nearly normal
    number, rounded down, at least 1 and at most max_length. The weight of a batch is the number of items in its
    histories.

    `times` [n, max_length + 1]: seconds of each item, then of the target, then 0. A session begins after a gap between
    the two LONG_GAP_SECONDS; items within it come after gaps between the two SHORT_GAP_SECONDS. Both are spread evenly
    over orders of magnitude. So times show where sessions begin, even if the target begins one.

    The seed draws the users. Items, their interests, their groups and where they lead are the same for every seed. A
    test set is at other positions: it has other users, whose histories were never trained on.
    """

    num_samples: int | None = None
    feature_names = ("history", "target")

    def __init__(self, seed: int = 0, num_samples: int | None = None, shape: HistoryShape | None = None) -> None:
        if num_samples is not None and num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}, must be at least 0, or None for endless data")
        self.seed = seed
        self.num_samples = num_samples
        self.shape = shape = shape or HistoryShape()
        items = np.arange(shape.num_items)
        self.popularity: Floats = np.exp(-shape.skew * np.log(items + 1.0))
        self.interests: Numbers = items % shape.num_interests
        self.groups: Numbers = items // shape.num_interests % shape.num_groups
        self.leads_to: Numbers = (stream("leads to", 0, items) % np.uint64(shape.num_groups)).astype(np.int64)
        self._by_popularity = _Shelf(self.popularity, np.zeros(shape.num_items, np.int64), 1)
        self._by_interest = _Shelf(self.popularity, self.interests, shape.num_interests)
        cells = self.groups * shape.num_interests + self.interests
        self._by_cell = _Shelf(self.popularity, cells, shape.num_groups * shape.num_interests)

    def samples(self, first: int, count: int) -> Batch:
        check_positions(first, count, self.num_samples)
        positions = np.arange(first, first + count, dtype=np.uint64)
        lengths = self._lengths(positions)
        begins, times = self._sessions(positions)
        items = self._items(positions, lengths, begins)
        in_history = np.arange(self.shape.max_length + 1) < lengths[:, None]
        times *= np.arange(self.shape.max_length + 1) <= lengths[:, None]
        offsets = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]))
        target = torch.from_numpy(items[np.arange(count), lengths])
        history = Jagged(torch.from_numpy(items[in_history]), offsets)
        keys = {"history": history, "target": Jagged.one_each(target)}
        return Batch(keys, {"times": torch.from_numpy(times)}, weight=float(lengths.sum()))

    def user_interests(self, positions: Words) -> Numbers:
        """Returns [n, interests_a_user] interests."""
        numbers = np.arange(self.shape.num_interests, dtype=np.uint64)
        words = stream("interests", self.seed, positions[:, None] * np.uint64(self.shape.num_interests) + numbers)
        return np.argsort(words, axis=1)[:, : self.shape.interests_a_user]

    def _lengths(self, positions: Words) -> Numbers:
        shape = self.shape
        lengths = shape.median_length * np.exp(shape.length_spread * normal(stream("length", self.seed, positions)))
        return np.clip(lengths.astype(np.int64), 1, shape.max_length)

    def _sessions(self, positions: Words) -> tuple[NDArray[np.bool_], Numbers]:
        """Returns [n, max_length + 1] whether each item begins a session, and its time."""
        units = _units(positions[:, None], np.arange(self.shape.max_length + 1))
        begins = uniform(stream("session", self.seed, units)) < self.shape.new_session
        begins[:, 0] = True
        low, high = (np.where(begins, LONG_GAP_SECONDS[i], SHORT_GAP_SECONDS[i]) for i in (0, 1))
        gaps = np.minimum(low * (high / low) ** uniform(stream("gap", self.seed, units)), high).astype(np.int64)
        gaps[:, 0] = (stream("start", self.seed, positions) % np.uint64(START_SECONDS)).astype(np.int64)
        return begins, gaps.cumsum(axis=1)

    def _items(self, positions: Words, lengths: Numbers, begins: NDArray[np.bool_]) -> Numbers:
        """Returns [n, max_length + 1] items of the history, then the target, then 0."""
        items = np.zeros((len(positions), self.shape.max_length + 1), np.int64)
        users = self.user_interests(positions)
        # All that does not depend on the item before is drawn for all places at once.
        num_places = int(lengths.max(initial=-1)) + 1
        first_draws = _Draws(self.seed, 0, _units(positions[:, None], np.arange(num_places)))
        first_others = self._others(first_draws, users[:, None], begins[:, :num_places])
        for place in range(num_places):
            pending, attempt = np.flatnonzero(lengths >= place), 0
            while len(pending) > 0:
                if attempt == 0:
                    draws, others = first_draws.at(pending, place), first_others[pending, place]
                else:
                    draws = _Draws(self.seed, attempt, _units(positions[pending], np.array(place)))
                    others = self._others(draws, users[pending], begins[pending, place])
                following = self._following(draws, users[pending], items[pending, place - 1])
                follows = (draws.way < self.shape.follow) & ~begins[pending, place, None]
                drawn = np.where(follows, following, others)
                had = (drawn[:, :, None] == items[pending, None, :place]).any(axis=2)
                which = np.argmin(had, axis=1)
                is_new = ~had[np.arange(len(pending)), which]
                items[pending[is_new], place] = drawn[is_new, which[is_new]]
                pending, attempt = pending[~is_new], attempt + 1
        return items

    def _others(self, draws: "_Draws", users: Numbers, begins: NDArray[np.bool_]) -> Numbers:
        """Returns candidates [..., ATTEMPTS] for users of these interests, where they do not follow an item before."""
        shape = self.shape
        way = np.where(begins[..., None], shape.follow + draws.way * (1 - shape.follow), draws.way)
        of_user = draws.interest(shape.interests_a_user)
        interest = np.take_along_axis(np.broadcast_to(users, (*of_user.shape[:-1], users.shape[-1])), of_user, axis=-1)
        by_interest = self._by_interest.take(interest, draws.item)
        popular = self._by_popularity.take(np.zeros_like(interest), draws.item)
        return np.where(way < shape.follow + shape.interest, by_interest, popular)

    def _following(self, draws: "_Draws", users: Numbers, before: Numbers) -> Numbers:
        """Returns candidates [n, ATTEMPTS] for users of these interests that follow the items `before`."""
        cells = self.leads_to[before][:, None] * self.shape.num_interests + users
        return self._by_cell.take_from_union(cells, draws.cell, draws.item)


class _Draws:
    """Random numbers [..., ATTEMPTS] for places of histories, in one round of attempts."""

    def __init__(self, seed: int, attempt: int, places: Words) -> None:
        units = _units(places[..., None], np.arange(ATTEMPTS), ATTEMPTS)
        self._words = stream(f"way {attempt}", seed, units)
        self.way = (self._words >> 40).astype(np.float64) * 2.0**-24
        self.item = uniform(stream(f"item {attempt}", seed, units))

    @property
    def cell(self) -> Floats:
        return (self._words >> 16 & 0xFFFFFF).astype(np.float64) * 2.0**-24

    def interest(self, num_interests: int) -> Numbers:
        """Returns the index of one of a user's interests."""
        return ((self._words & 0xFFFF) % np.uint64(num_interests)).astype(np.int64)

    def at(self, users: Numbers, place: int) -> "_Draws":
        """Returns the numbers of some users at one place."""
        draws = copy(self)
        draws._words, draws.way, draws.item = (a[users, place] for a in (self._words, self.way, self.item))
        return draws


class _Shelf:
    """Items by class, drawn from a class in proportion to their popularity."""

    def __init__(self, popularity: Floats, classes: Numbers, num_classes: int) -> None:
        self.order = np.argsort(classes, kind="stable")
        self.cumulated = np.concatenate([np.zeros(1), popularity[self.order].cumsum()])
        self.first = np.searchsorted(classes[self.order], np.arange(num_classes + 1))
        self.low = self.cumulated[self.first]

    def take(self, classes: Numbers, places: Floats) -> Numbers:
        """Draws an item of each class; places: in [0, 1), where in the class's cumulated popularity the item is."""
        low, high = self.low[classes], self.low[classes + 1]
        where = np.searchsorted(self.cumulated, low + places * (high - low), side="right") - 1
        # Rounding may reach beyond the class.
        items: Numbers = self.order[np.clip(where, self.first[classes], self.first[classes + 1] - 1)]
        return items

    def take_from_union(self, classes: Numbers, which: Floats, places: Floats) -> Numbers:
        """Draws [n, ATTEMPTS] items, each from the union of several classes [n, num_classes]."""
        cumulated = (self.low[classes + 1] - self.low[classes]).cumsum(axis=1)
        is_before = (which * cumulated[:, -1:])[:, :, None] >= cumulated[:, None, :-1]
        return self.take(np.take_along_axis(classes, is_before.sum(axis=2), axis=1), places)


def _units(numbers: Words, places: NDArray[np.integer], num_places: int = 2**12) -> Words:
    units: Words = numbers * np.uint64(num_places) + places.astype(np.uint64)
    return units
