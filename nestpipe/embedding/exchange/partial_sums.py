"""Partial sums of bags in the exchange: one group of them on the requester and on the owner. See embedding/bags.py."""

from torch import Tensor

from nestpipe.embedding.bags import Bags
from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.owned_bags import OwnedBags
from nestpipe.embedding.resident import RowSource


class SumRequester:
    """Received partial sums and their gradients. One micro-batch uses each, so nothing is kept or added up."""

    def __init__(self, bags: Bags, memory: Memory, limit: float) -> None:
        """limit: largest magnitude of a gradient."""
        self._bags = bags
        self._memory = memory
        self._limit = limit
        self._rows: dict[int, Tensor] = {}
        """Partial sums by micro-batch, until its dense part begins."""

    def arriving(self, micro_batch: int) -> Tensor:
        """Returns the memory for the arriving partial sums of a micro-batch."""
        if micro_batch not in self._rows:
            self._rows[micro_batch] = self._empty(micro_batch)
        return self._rows[micro_batch]

    def gather(self, micro_batch: int) -> None: ...

    def pop_rows(self, micro_batch: int) -> Tensor:
        return self._rows.pop(micro_batch)

    def collect(self, micro_batch: int, gradient: Tensor | None, exceeds: Tensor) -> Tensor:
        """Checks the gradient of a micro-batch, and returns it."""
        if gradient is None:
            gradient = self._empty(micro_batch).zero_()
        self._memory.check_rows(gradient, self._limit, exceeds)
        return gradient

    def _empty(self, micro_batch: int) -> Tensor:
        group = self._bags.group
        return self._memory.empty_rows(self._bags.num_rows(micro_batch), group.dim, group.dtype)


class SumOwner:
    """The partial sums that an owner sends."""

    def __init__(self, bags: OwnedBags, group: TableGroup, resident: RowSource, memory: Memory) -> None:
        self._bags = bags
        self._resident = resident
        self._memory = memory
        self.sums = memory.empty_rows(bags.num_sums, group.dim, group.dtype)
        """All partial sums; those of a micro-batch are valid once it is filled."""
        self._rows: Tensor | None = None
        """The rows that they add up."""

    def sent_from(self) -> tuple[Tensor, None]:
        return self.sums, None

    def fill(self, micro_batch: int) -> None:
        """Adds up the partial sums of a micro-batch."""
        segments, weights = self._bags.sums[micro_batch], self._bags.weights[micro_batch]
        self.sums[self._bags.sums_of(micro_batch)] = self._memory.sum_rows(self._read_rows(), segments, weights)

    def _read_rows(self) -> Tensor:
        if self._rows is None:
            (source, slots), keys = self._resident.sent_from(), self._bags.keys
            self._rows = self._memory.empty_rows(len(keys), source.shape[1], source.dtype)
            places = keys if slots is None else slots.index_select(0, keys)
            self._memory.copy_rows(source, places, self._rows, None)
        return self._rows
