"""Lists of rows that travel, and the layout of the messages that carry them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.device.transfer import ALIGNMENT


@dataclass(frozen=True)
class TravelList:
    """The keys that travel with each part, and how many go to, or come from, each rank."""

    places: Tensor
    """Indices of the keys, part after part: those of other ranks ascending, then this rank's own."""
    bounds: list[int]
    """[2 * parts + 1] starts in `places`: of each part, those of other ranks and the own ones."""
    counts: NDArray[np.int64]
    """[parts, ranks] keys of each other rank; 0 for this rank."""
    message_places: Tensor | None = None
    """Place of each row of other ranks in its message, in units, part after part; None if contiguous."""
    message_bounds: tuple[int, ...] = ()
    """[parts + 1] start of each part of message_places."""

    def others(self, part: int) -> Tensor:
        return self.places[self.bounds[2 * part] : self.bounds[2 * part + 1]]

    def own(self, part: int) -> Tensor:
        return self.places[self.bounds[2 * part + 1] : self.bounds[2 * part + 2]]

    def in_message(self, part: int) -> Tensor | None:
        if self.message_places is None:
            return None
        return self.message_places[self.message_bounds[part] : self.message_bounds[part + 1]]

    def num_others(self, part: int) -> int:
        return self.bounds[2 * part + 1] - self.bounds[2 * part]

    def num_own(self, part: int) -> int:
        return self.bounds[2 * part + 2] - self.bounds[2 * part + 1]

    def select(self, numbers: Tensor) -> "TravelList":
        """Replaces each place by its entry in `numbers`."""
        return replace(self, places=numbers.index_select(0, self.places))

    def widened(self, num_before: int, num_after: int) -> "TravelList":
        """Adds empty parts before and after the others."""
        bounds = [0] * (2 * num_before) + self.bounds + [self.bounds[-1]] * (2 * num_after)
        return replace(self, bounds=bounds, counts=np.pad(self.counts, ((num_before, num_after), (0, 0))))

    def map(self, function: Callable[[Tensor], Tensor]) -> "TravelList":
        in_message = None if self.message_places is None else function(self.message_places)
        return replace(self, places=function(self.places), message_places=in_message)


@dataclass(frozen=True)
class MessageSizes:
    """Sizes of the messages of one direction. A message has the rows of rank after rank, and for each rank those of
    group after group, each starting at a multiple of 16 bytes. A rank sends no message to itself."""

    sizes: list[list[int]]
    """[parts][ranks] bytes."""
    row_bytes: list[int]
    """[parts] bytes of rows alone."""
    num_bytes: list[int]
    """[parts] bytes of the whole message."""


def lay_out(lists: list[TravelList], row_bytes: list[int]) -> tuple[MessageSizes, list[TravelList]]:
    """Lays out the messages of one direction, of all parts and ranks at once."""
    used = [travel.counts * width for travel, width in zip(lists, row_bytes, strict=True)]
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in used]
    sizes = np.sum(padded, axis=0)
    starts = np.cumsum(sizes, axis=1) - sizes
    laid_out = []
    for travel, width, size in zip(lists, row_bytes, padded, strict=True):
        laid_out.append(_with_message_places(travel, starts, width))
        starts = starts + size
    totals = np.sum(used, axis=(0, 2)).tolist(), sizes.sum(axis=1).tolist()
    return MessageSizes(sizes.tolist(), *totals), laid_out


def message_unit(row_bytes: int) -> int:
    """Returns the unit of places in a message, in bytes: every row begins at a multiple of it."""
    return gcd(row_bytes, ALIGNMENT)


def _with_message_places(travel: TravelList, starts: NDArray[np.int64], row_bytes: int) -> TravelList:
    """Sets the places of rows in the message. starts: [parts, ranks] bytes at which the group's rows begin."""
    counts = travel.counts
    totals = counts.sum(axis=1)
    bounds = np.concatenate([[0], np.cumsum(totals)])
    flat = counts.ravel()
    before = np.cumsum(counts, axis=1) - counts
    if np.array_equal(starts[counts > 0], (before * row_bytes)[counts > 0]):
        return replace(travel, message_places=None)  # one group without gaps: rows are contiguous
    shift = starts.ravel() - (np.cumsum(flat) - flat) * row_bytes
    places = np.repeat(shift, flat) + np.arange(int(bounds[-1])) * row_bytes
    in_message = torch.from_numpy(places // message_unit(row_bytes))
    return replace(travel, message_places=in_message, message_bounds=tuple(bounds.tolist()))
