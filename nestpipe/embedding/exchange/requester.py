"""The requester's side of an exchange: the rows of a batch that arrive, and the sums of gradients that leave."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from nestpipe.embedding.dedup import BatchDedup, RequesterDedup
from nestpipe.embedding.exchange.codec import Codecs
from nestpipe.embedding.exchange.partial_sums import SumRequester
from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.memory import Memory


class Requester(Protocol):
    """One group of a batch on a rank that asks others for rows, or for partial sums."""

    def arriving(self, micro_batch: int) -> Tensor:
        """Returns the memory for the arriving rows of a micro-batch."""

    def gather(self, micro_batch: int) -> None:
        """Takes note that the rows of a micro-batch have arrived."""

    def pop_rows(self, micro_batch: int) -> Tensor:
        """Returns the rows of a micro-batch, once."""

    def collect(self, micro_batch: int, gradient: Tensor | None, exceeds: Tensor) -> Tensor:
        """Takes the gradient of a micro-batch, and returns the array from which gradients are sent."""


def make_requesters(
    batch: BatchDedup, window: str, memory: Memory, codecs: Codecs, world_size: int, num_added: int = 1
) -> Sequence[Requester]:
    """Returns the requester of each group of the plan: those of rows, then those of partial sums. num_added: gradients
    of a row that are added up before they are encoded."""

    def limit(group: TableGroup) -> float:
        return codecs.sum_limit(group.dtype, world_size, num_added)

    return [
        *(_Requester(dedup, window, memory, limit(dedup.group)) for dedup in batch.groups),
        *(SumRequester(bags, memory, limit(bags.group)) for bags in batch.bags),
    ]


class _Requester:
    """See Requester. Keeps received rows and summed gradients."""

    def __init__(self, dedup: RequesterDedup, window: str, memory: Memory, limit: float) -> None:
        self._dedup = dedup
        self._resends = window == "resend"
        self._memory = memory
        self._is_split = len(dedup.row_offsets) > 2
        self._limit = limit
        self._rows: dict[int, Tensor] = {}
        """Rows by micro-batch, until its dense part begins."""
        self._kept: Tensor | None = None
        """Rows received so far, by position."""
        self._sums: Tensor | None = None
        """Gradients summed so far, by position."""
        self._last: Tensor | None = None
        """If rows are resent: gradient of the last micro-batch so far that has a position, by position."""

    def arriving(self, micro_batch: int) -> Tensor:
        """Returns the memory for the arriving rows of a micro-batch. A single micro-batch needs no other copy."""
        if not self._is_split:
            if micro_batch not in self._rows:  # else its early rows have arrived
                self._rows[micro_batch] = self._empty(self._dedup.num_rows(micro_batch))
            return self._rows[micro_batch]
        if self._kept is None:
            self._kept = self._empty(len(self._dedup.keys))
        return self._kept

    def gather(self, micro_batch: int) -> None:
        """Gathers the rows of a micro-batch from those that arrived with it or earlier."""
        if self._kept is not None:
            self._rows[micro_batch] = rows = self._empty(self._dedup.num_rows(micro_batch))
            self._memory.copy_rows(self._kept, self._positions(micro_batch), rows, None)

    def pop_rows(self, micro_batch: int) -> Tensor:
        return self._rows.pop(micro_batch)

    def collect(self, micro_batch: int, gradient: Tensor | None, exceeds: Tensor) -> Tensor:
        """Adds a micro-batch's gradient to the sums, and returns the array from which gradients are sent."""
        if gradient is None:
            gradient = self._empty(self._dedup.num_rows(micro_batch)).zero_()
        if not self._is_split:
            self._memory.check_rows(gradient, self._limit, exceeds)
            return gradient
        if self._sums is None:
            self._sums = self._empty(len(self._dedup.keys))
        positions, is_first = self._positions(micro_batch), self._dedup.is_first[self._dedup.rows_of(micro_batch)]
        self._memory.add_rows(self._sums, positions, gradient, is_first, self._limit, exceeds)
        return self._by_position(positions, gradient) if self._resends else self._sums

    def _by_position(self, positions: Tensor, gradient: Tensor) -> Tensor:
        if self._last is None:
            self._last = self._empty(len(self._dedup.keys))
        self._memory.copy_rows(gradient, None, self._last, positions)
        return self._last

    def _positions(self, micro_batch: int) -> Tensor:
        return self._dedup.row_positions[self._dedup.rows_of(micro_batch)]

    def _empty(self, num_rows: int) -> Tensor:
        return self._memory.empty_rows(num_rows, self._dedup.group.dim, self._dedup.group.dtype)
