"""Histories of users, one row each, as samples: what was before and what came next, with the last items held out."""

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Dataset, Fingerprint, fingerprint_of
from nestpipe.data.files.row_files import BadDataError
from nestpipe.data.negatives import Negatives
from nestpipe.data.synthetic.draws import stream

HELD_OUT_ITEMS = {"train": 2, "validation": 1, "test": 0}
"""items at the end of each history that a part does not see; the item before them is its last target"""
Numbers = NDArray[np.int64]
CROPS = ("last", "random")
LEAST_ITEMS = 2
"""that a part must have of a user: one to predict from, one to predict"""
ROWS_A_LOOK = 4096


class UserHistories(Dataset):
    """A user for each sample: `history`, `target`, the item that follows it, and `times`, as the next-item models need.

    Of each user the last item is the target of the part "test", the one before it that of "validation", and the rest is
    the part "train". A history has at most max_length items: the last ones before the target. Of longer ones, crop
    "random" trains on any max_length + 1 items in a row instead, another stretch in each epoch: which one depends on
    the seed and the sample's position. Users with fewer than two items in a part are left out of the batch; if that is
    every user of an epoch, it is an error, found at the first batch without a sample.

    rows: a dataset with two features, the items and their times in seconds, as lists of the same lengths. The weight of
    a batch is the number of items in its histories.
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
        """whether a user with enough items was met"""

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
            self._has_samples = len(kept) > 0 or self._look_for_samples(first)
        positions, num_seen = first + kept, num_seen[kept]
        lengths = np.minimum(num_seen - 1, self.max_length)
        begins = offsets[:-1][kept] + self._starts(positions, num_seen - 1 - lengths)
        history = _stretches(items.values.numpy(), begins, lengths)
        target = torch.from_numpy(items.values.numpy()[begins + lengths])
        keys = {"history": history, "target": Jagged.one_each(target)}
        if self.negatives is not None:
            keys["negatives"] = self.negatives.draw(positions, history)
        inputs = {"times": torch.from_numpy(self._times(times.values.numpy(), begins, lengths))}
        return Batch(keys, inputs, weight=float(lengths.sum()))

    def fingerprint(self) -> Fingerprint:
        found: Fingerprint = {"part": self.part, "max_length": self.max_length, "random crop": self.is_random}
        if self.is_random:
            found["seed of the crop"] = self.seed
        return fingerprint_of(self.rows) | found

    def _look_for_samples(self, first: int) -> bool:
        """From this position on through its epoch, until there is one: batches without any would come for ever."""
        num_rows: int | None = getattr(self.rows, "num_rows", self.rows.num_samples)
        if num_rows is None:
            return False  # endless data without epochs: nobody knows what is still to come
        needed = HELD_OUT_ITEMS[self.part] + LEAST_ITEMS
        begin = first - first % num_rows
        for at, end in ((first, begin + num_rows), (begin, first)):
            for position in range(at, end, ROWS_A_LOOK):
                items = self.rows.samples(position, min(ROWS_A_LOOK, end - position)).keys[self.item]
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
        """Where the history begins, of so many items that it could leave out before it."""
        if not self.is_random:
            return num_left
        uniform = (stream("stretch", self.seed, positions) >> 11).astype(np.float64) * 2.0**-53
        starts: Numbers = (uniform * (num_left + 1)).astype(np.int64)
        return starts

    def _times(self, times: Numbers, begins: Numbers, lengths: Numbers) -> Numbers:
        """[n, max_length + 1]: of the history, then of the target, the rest 0."""
        places = np.arange(self.max_length + 1)
        is_used = places <= lengths[:, None]
        result = np.zeros(is_used.shape, np.int64)
        result[is_used] = times[(begins[:, None] + places)[is_used]]
        return result


def _stretches(values: Numbers, begins: Numbers, lengths: Numbers) -> Jagged:
    offsets = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    where = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
    return Jagged(torch.from_numpy(values[where]), torch.from_numpy(offsets))
