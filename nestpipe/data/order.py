"""The order of samples, equal on all ranks: row groups are permuted, and rows within windows of row groups."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.synthetic.draws import stream

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """A few row groups whose rows are shuffled together. Their samples have consecutive positions."""

    first: int
    """Position of its first sample."""
    num_rows: int
    groups: tuple[int, ...]
    epoch: int

    @property
    def end(self) -> int:
        return self.first + self.num_rows


class SampleOrder:
    """Maps positions of samples to rows. The order depends on the seed and the sizes of the row groups alone.

    Epoch e has the positions e * num_rows .. (e + 1) * num_rows - 1. In each epoch the row groups are permuted anew;
    each `window` consecutive ones form a window, whose rows are permuted. It needs memory for a few numbers for each
    row group, and for one number for each row of a window. Without shuffle, rows come in the order of the files.
    """

    def __init__(self, group_rows: list[int], seed: int = 0, window: int = 8, shuffle: bool = True) -> None:
        if window < 1:
            raise ValueError(f"window is {window}, must be at least 1 row group")
        self.group_rows: Numbers = np.array(group_rows, np.int64)
        self.num_rows = int(self.group_rows.sum())
        self.seed = seed
        self.window = window
        self.shuffle = shuffle
        self._first_row = np.concatenate([np.zeros(1, np.int64), self.group_rows.cumsum()])
        self._cached_epoch = lru_cache(2)(self._epoch)

    def __reduce__(self) -> tuple[type["SampleOrder"], tuple[list[int], int, int, bool]]:
        return SampleOrder, (self.group_rows.tolist(), self.seed, self.window, self.shuffle)  # without the cache

    def window_at(self, position: int) -> Window:
        """Returns the window of the sample at a position."""
        epoch, place = divmod(position, self.num_rows)
        groups, starts = self._cached_epoch(epoch)
        number = int(np.searchsorted(starts, place, side="right")) - 1
        chosen = groups[number * self.window : (number + 1) * self.window]
        first, end = int(starts[number]), int(starts[number + 1])
        return Window(epoch * self.num_rows + first, end - first, tuple(chosen.tolist()), epoch)

    def rows(self, window: Window) -> Numbers:
        """Returns the row of each sample of a window, counted through the window's row groups."""
        if not self.shuffle:
            return np.arange(window.num_rows)
        numbers = [np.arange(self._first_row[group], self._first_row[group + 1]) for group in window.groups]
        words = stream(f"rows {window.epoch}", self.seed, np.concatenate(numbers))
        return np.argsort(words, kind="stable")

    def _epoch(self, epoch: int) -> tuple[Numbers, Numbers]:
        """Returns the row groups in their order, and the first position of each window, followed by the end."""
        groups = np.flatnonzero(self.group_rows)
        if self.shuffle:
            groups = groups[np.argsort(stream(f"row groups {epoch}", self.seed, groups), kind="stable")]
        ends = np.concatenate([np.zeros(1, np.int64), self.group_rows[groups].cumsum()])
        starts = ends[:: self.window]
        return groups, starts if starts[-1] == ends[-1] else np.append(starts, ends[-1])
