"""Exchange across the batch boundary: what need not wait for the update between two consecutive batches.

A row of the later batch is early if the earlier batch does not have its key: nothing changes it meanwhile, so it is
sent while the earlier batch trains. A gradient of the earlier batch is late if the later batch does not have its key:
it is returned and applied while the later batch trains. Owners decide, since they know the keys of all ranks. They
answer the route of the later batch with two lists of bits: of its keys, which are early; of the earlier batch's keys,
which are late.

A batch that is no step has no keys. A row optimizer that has to update all rows at once has no late gradients.
Replicated tables have neither early rows nor late gradients. Nor have features that are pooled at the owner; of a key
that they use, no gradient is late.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.distributed import Channel
from nestpipe.embedding.plan_parts import Marks
from nestpipe.embedding.route import OwnerDedup, Route
from nestpipe.store import match_tables
from nestpipe.store.native import plan_ops

ERROR_BITS = 8
"""Bits before the marks in each message: all 1 if the sender has failed. A whole byte."""


@dataclass(frozen=True)
class Crossing:
    """Marks of the keys of two consecutive batches, by group."""

    early: list[Marks]
    """Keys of the later batch."""
    late: list[Marks]
    """Keys of the earlier batch."""
    num_bytes: int
    """Bytes sent to other ranks."""


def compare(earlier: Route, later: Route, channel: Channel, has_late: bool, num_threads: int) -> Crossing:
    """Finds out, as owner and as requester, what may cross the boundary. If a rank fails, all ranks raise.

    has_late: False if the gradients of the earlier batch are all needed for its update.
    """
    owned, error = owned_marks(earlier, later, has_late, num_threads)
    lists = [*_lists(later), *_lists(earlier)]
    received, num_bytes, failed = exchange_marks(lists, owned, channel, error is not None)
    if error is not None or len(failed) > 0:
        channel.raise_agreed(error, failed + [channel.rank] * (error is not None))
    marks = [Marks(positions, keys) for positions, keys in zip(received, owned, strict=True)]
    num_groups = len(later.owner_dedups)
    return Crossing(marks[:num_groups], marks[num_groups:], num_bytes)


def owned_marks(
    earlier: Route, later: Route, has_late: bool, num_threads: int
) -> tuple[list[Tensor], Exception | None]:
    """Returns by group which owned keys of the later batch are early, then which of the earlier one are late. If that
    fails, returns no marks, and the error."""
    try:
        early, late = _owned_marks(earlier, later, has_late, num_threads)
    except Exception as error:  # no memory, for example
        return [], error
    return [*early, *late], None


def _owned_marks(earlier: Route, later: Route, has_late: bool, num_threads: int) -> tuple[list[Tensor], list[Tensor]]:
    """Returns by group which owned keys of the later batch are early, and which of the earlier one are late."""
    all_early, all_late = [], []
    for before, after in zip(earlier.owner_dedups, later.owner_dedups, strict=True):
        early = torch.ones(len(after.keys), dtype=torch.bool)
        late = torch.ones(len(before.keys), dtype=torch.bool)
        if earlier.is_step and later.is_step:
            lists = before.keys, before.table_offsets, after.keys, after.table_offsets
            places = match_tables(*lists, num_threads)
            early = places < 0
            late[places[~early]] = False
        if not (has_late and before.group.allows_late_gradients):
            late.zero_()
        if before.bags is not None:  # a late gradient would have to wait for those of bags
            late[before.bags.keys] = False
        if before.group.is_replicated:
            early.zero_()
        all_early.append(early)
        all_late.append(late)
    return all_early, all_late


class Asking(Protocol):
    """Keys of one group that this rank asks for: RequesterDedup or HopKeys."""

    @property
    def counts_by_owner(self) -> NDArray[np.int64]: ...


_List = tuple[Asking, OwnerDedup]


def _lists(route: Route) -> list[_List]:
    return list(zip(route.batch.groups, route.owner_dedups, strict=True))


def exchange_marks(
    lists: Sequence[_List], owned: Sequence[Tensor], channel: Channel, has_failed: bool
) -> tuple[list[Tensor], int, list[int]]:
    """Answers each requester with a bit for each of its keys. Returns the bits of this rank's own requests, the bytes
    sent, and the ranks that have failed; no bits if any has. has_failed: this rank has; it then sends no bits."""
    sent = _BitLayout([owner.entry_counts for _, owner in lists], channel.rank)
    arriving = _BitLayout([dedup.counts_by_owner for dedup, _ in lists], channel.rank)
    entries = [marks.index_select(0, owner.key_index) for (_, owner), marks in zip(lists, owned, strict=False)]
    message, received = sent.message(entries, has_failed), arriving.empty()
    channel.all_to_all(message, sent.sizes.tolist(), received, arriving.sizes.tolist())
    failed = arriving.failed(received)
    if has_failed or len(failed) > 0:
        return [], len(message), failed
    return arriving.marks(received, [sent.own(marks, g) for g, marks in enumerate(entries)]), len(message), []


class _BitLayout:
    """A message of bits: rank after rank, and for each rank, list after list. A rank sends none to itself."""

    def __init__(self, counts: list[NDArray[np.int64]], own_rank: int) -> None:
        """counts: keys of each rank, this one included, by list."""
        self._counts = counts
        self._is_other = np.arange(len(counts[0])) != own_rank
        self._own_rank = own_rank
        self._sent = [np.where(self._is_other, list_, 0) for list_ in counts]
        num_bits = np.sum(self._sent, axis=0) + ERROR_BITS
        self.sizes: NDArray[np.int64] = np.where(self._is_other, (num_bits + 7) // 8, 0)
        """[ranks] bytes."""
        self._first_bytes = np.cumsum(self.sizes) - self.sizes
        before = np.cumsum(self._sent, axis=0) - self._sent
        self._starts = [np.where(self._is_other, 8 * self._first_bytes + ERROR_BITS + list_, 0) for list_ in before]
        """[lists][ranks] first bit of each part."""

    def message(self, lists: Sequence[Tensor], has_failed: bool) -> Tensor:
        bits = torch.zeros(8 * int(self.sizes.sum()), dtype=torch.uint8)
        if has_failed:
            bits.fill_(1)
        for marks, counts, sent, starts in zip(lists, self._counts, self._sent, self._starts, strict=False):
            plan_ops.copy_runs(marks.view(torch.uint8), np.cumsum(counts) - counts, bits, starts, sent)
        return torch.from_numpy(np.packbits(bits.numpy()))

    def empty(self) -> Tensor:
        return torch.empty(int(self.sizes.sum()), dtype=torch.uint8)

    def failed(self, message: Tensor) -> list[int]:
        """Returns the ranks that have sent an error."""
        others = np.flatnonzero(self._is_other)
        failed: list[int] = others[message.numpy()[self._first_bytes[others]] != 0].tolist()
        return failed

    def marks(self, message: Tensor, own: Sequence[Tensor]) -> list[Tensor]:
        """Returns the marks of each list, those of this rank's own part included."""
        bits = torch.from_numpy(np.unpackbits(message.numpy()))
        lists = []
        for g, (counts, sent, starts) in enumerate(zip(self._counts, self._sent, self._starts, strict=True)):
            marks = torch.empty(int(counts.sum()), dtype=torch.uint8)
            plan_ops.copy_runs(bits, starts, marks, np.cumsum(counts) - counts, sent)
            marks[self._own_slice(g)] = own[g].view(torch.uint8)
            lists.append(marks.view(torch.bool))
        return lists

    def own(self, marks: Tensor, number: int) -> Tensor:
        """Returns this rank's own part of a list."""
        return marks[self._own_slice(number)]

    def _own_slice(self, number: int) -> slice:
        counts = self._counts[number]
        first = int(counts[: self._own_rank].sum())
        return slice(first, first + int(counts[self._own_rank]))
