"""Histories of users as samples: items, and the item that came next. The last items are held out."""

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Dataset, Fingerprint, fingerprint_of
from nestpipe.data.files.row_files import BadDataError
from nestpipe.data.negatives import Negatives
from nestpipe.data.synthetic.draws import stream, uniform

HELD_OUT_ITEMS = {"train": 2, "validation": 1, "test": 0}
"""Items at the end of each history that are hidden from a part; the item before them is its last target."""
Numbers = NDArray[np.int64]
CROPS = ("last", "random")
LEAST_ITEMS = 2
"""Items that a part must have of a user: one to predict from, one to predict."""
ROWS_A_SEARCH = 4096
"""Rows read at a time by the search for a user with enough items."""


class UserHistories(Dataset):
    """One sample for each user, as next-item models need it: `history`, `target` (the item after it), and `times`.

    The last item of each user is the target of the part "test", the one before it that of "validation"; the others are
    the part "train". A history has at most max_length items, the last ones before the target. If more were available,
    crop "random" trains on any max_length + 1 consecutive items instead; the seed and the sample's position choose
    them, so they differ between epochs. Users with fewer than two items in a part are left out of the batch. If an
    epoch has no other users, the first batch without a sample raises an error.

    rows: a dataset with two features, the items and their times in seconds, as lists of equal lengths. The weight of a
    batch is the number of items in its histories.
    """

    def __init__(
        self,
        rows: Dataset,
        max_length: int,
        part: str = "train",
        crop: str = "last",
        seed: int = 0,
        negatives: Negatives | None = None,
        item: str = "item",
        time: str = "time_seconds",
    ) -> None:
        if part not in HELD_OUT_ITEMS:
            raise ValueError(f"part is {part!r}, must be one of {', '.join(HELD_OUT_ITEMS)}")
        if crop not in CROPS:
            raise ValueError(f"crop is {crop!r}, must be one of {', '.join(CROPS)}")
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}, must be at least 1")
        self.rows = rows
        self.max_length = max_length
        self.part = part
        self.is_random = crop == "random" and part == "train"
        self.seed = seed
        self.negatives = negatives
        self.item = item
        self.time = time
        self._has_samples = False
        """Whether a user with enough items was seen."""

    @property
    def num_samples(self) -> int | None:
        return self.rows.num_samples

    def samples(self, first: int, count: int) -> Batch:
        batch = self.rows.samples(first, count)
        items, times = batch.keys[self.item], batch.keys[self.time]
        offsets, num_items = items.offsets.numpy(), items.lengths.numpy()
        self._check(first, num_items, times.lengths.numpy())
        num_seen = num_items - HELD_OUT_ITEMS[self.part]
        kept = np.flatnonzero(num_seen >= LEAST_ITEMS)
        if count > 0 and not self._has_samples:
            self._has_samples = len(kept) > 0 or self._find_sample(first)
        positions, num_seen = first + kept, num_seen[kept]
        lengths = np.minimum(num_seen - 1, self.max_length)
        begins = offsets[:-1][kept] + self._starts(positions, num_seen - 1 - lengths)
        history = _slices(items.values.numpy(), begins, lengths)
        target = torch.from_numpy(items.values.numpy()[begins + lengths])
        keys = {"history": history, "target": Jagged.one_each(target)}
        if self.negatives is not None:
            keys["negatives"] = self.negatives.draw(positions, history)
        inputs = {"times": torch.from_numpy(self._times(times.values.numpy(), begins, lengths))}
        return Batch(keys, inputs, weight=float(lengths.sum()))

    def fingerprint(self) -> Fingerprint:
        fingerprint: Fingerprint = {"part": self.part, "max_length": self.max_length, "random crop": self.is_random}
        if self.is_random:
            fingerprint["seed of the crop"] = self.seed
        return fingerprint_of(self.rows) | fingerprint

    def _find_sample(self, first: int) -> bool:
        """Searches an epoch for a user with enough items. Without one, training would read empty batches for ever."""
        num_rows: int | None = getattr(self.rows, "num_rows", self.rows.num_samples)
        if num_rows is None:
            return False  # endless data without epochs: the next samples cannot be known
        needed = HELD_OUT_ITEMS[self.part] + LEAST_ITEMS
        begin = first - first % num_rows
        for start, end in ((first, begin + num_rows), (begin, first)):
            for position in range(start, end, ROWS_A_SEARCH):
                items = self.rows.samples(position, min(ROWS_A_SEARCH, end - position)).keys[self.item]
                if bool((items.lengths >= needed).any()):
                    return True
        raise BadDataError(
            f"none of the {num_rows} users has the {needed} items that part {self.part!r} needs: the last "
            f"{needed - LEAST_ITEMS} of each are held out, and {LEAST_ITEMS} must be left, one to predict from and one "
            "to predict; take data with longer histories, or prepare it with a filter that keeps users with more items"
        )

    def _check(self, first: int, num_items: Numbers, num_times: Numbers) -> None:
        differs = np.flatnonzero(num_items != num_times)
        if len(differs) > 0:
            user = int(differs[0])
            raise ValueError(
                f"the sample at position {first + user} has {num_items[user]} items, but {num_times[user]} times; each "
                "item needs one"
            )

    def _starts(self, positions: Numbers, num_left: Numbers) -> Numbers:
        """Returns the number of items before each history, of `num_left` that do not fit into it."""
        if not self.is_random:
            return num_left
        draws = uniform(stream("stretch", self.seed, positions))
        starts: Numbers = (draws * (num_left + 1)).astype(np.int64)
        return starts

    def _times(self, times: Numbers, begins: Numbers, lengths: Numbers) -> Numbers:
        """Returns [n, max_length + 1] times: of the history, then of the target, then 0."""
        places = np.arange(self.max_length + 1)
        is_used = places <= lengths[:, None]
        result = np.zeros(is_used.shape, np.int64)
        result[is_used] = times[(begins[:, None] + places)[is_used]]
        return result


def _slices(values: Numbers, begins: Numbers, lengths: Numbers) -> Jagged:
    offsets = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    where = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
    return Jagged(torch.from_numpy(values[where]), torch.from_numpy(offsets))
