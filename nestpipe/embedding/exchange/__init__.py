"""The exchange: rows from owners to requesters, gradients back. One interface, with and without other ranks.

A row does not change between its sending and the arrival of the batch's gradient for it. The gradients of a row are
added in a fixed order: a requester's micro-batches 0, 1, ..., then the requesters in order of rank. Early rows are sent
before the batch trains, late gradients are returned after it (see crossing.py).

A requester checks its own sums. If one is not finite, or so large that the sum over all ranks might not be, all ranks
learn it before the step counts. Owners check nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nestpipe.distributed import Channel, Notice
from nestpipe.distributed.hosts import Hosts
from nestpipe.embedding.crossing import Crossing
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.exchange.codec import EXACT, Codecs
from nestpipe.embedding.group import FeatureGroups
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.embedding.plan_parts import Marks, Plan, Returns
from nestpipe.embedding.resident import ResidentRows
from nestpipe.embedding.route import Route


@dataclass(frozen=True)
class RowGradients:
    """Sums of gradients over the global batch, of owned keys of one group."""

    values: Tensor
    """[n, dim]"""
    keys: Tensor | None = None
    """[n] indices of the owned keys; None if these are all keys, in order."""
    everywhere: Tensor | None = None
    """[m, dim] of a replicated group: the sums of all owners, in order of the touched keys."""


class BatchExchange(Protocol):
    """The exchanges of one batch. All lists are by table group."""

    exceeds: Tensor
    """One int32, not 0 if a sum of this requester is not finite or too large."""

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of rows that travel to other ranks."""

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of gradients that travel to other ranks."""

    def send_early_rows(self) -> None:
        """Sends the rows that the batch before does not change. Its update may come later."""

    def send_rows(self, micro_batch: int) -> None:
        """Sends the rows that a micro-batch needs from owners to requesters, but for those that were sent before."""

    def rows(self, micro_batch: int) -> list[ModelRows]:
        """Returns the rows of a micro-batch that was sent. Call it once for each micro-batch."""

    def return_gradients(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        """Returns the gradients of a micro-batch's rows to their owners; None where there is no gradient."""

    def share_sums(self) -> None:
        """Sends sums of the gradients that were returned: with several sharding groups, those of each to its replica
        group; then those of replicated tables from each owner to all ranks."""

    def sum_gradients(self) -> list[RowGradients | None]:
        """Returns the sums of the gradients that all ranks returned, but for late ones; None for a frozen group."""

    @property
    def has_late_gradients(self) -> bool:
        """Returns whether late gradients were planned. They may be none on this rank, or on any."""

    def return_late_gradients(self) -> None:
        """Returns the gradients that the next batch does not need, after those of the last micro-batch."""

    def sum_late_gradients(self) -> list[RowGradients | None]:
        """Returns their sums."""


class Exchange(Protocol):
    """Opens the exchanges of batches."""

    size: int
    """Number of ranks."""
    num_owners: int
    """Ranks among which the rows of a requester are sharded."""

    def route(self, batch: BatchDedup | Exception, features: FeatureGroups, notice: Notice) -> Route | None:
        """Tells owners which keys the batch needs, and all ranks this rank's notice. Returns None at the end of data;
        raises an error on all ranks."""

    def compare(self, earlier: Route, later: Route, has_late: bool, num_threads: int) -> Crossing:
        """Finds out what may cross the boundary between two consecutive batches. All ranks do."""

    def plan(
        self, route: Route, window: str, early: list[Marks] | None = None, has_returns: bool = True
    ) -> Plan | None:
        """Plans what travels with each micro-batch; returns None if nothing travels. early: rows that are sent early;
        None if none are. has_returns: False if plan_returns follows."""

    def plan_returns(self, route: Route, window: str, late: list[Marks] | None) -> Returns | None:
        """Plans which gradients travel with each micro-batch, and which late; returns None if nothing travels."""

    def agree(self, error: Exception | None) -> None:
        """Raises on all ranks if any of them has an error."""

    def open(self, route: Route, plan: Plan | None, resident: list[ResidentRows] | None) -> BatchExchange:
        """Opens the exchanges of a batch whose rows are resident. resident: None if that failed on this rank, which
        then takes part in the exchange of early rows only."""


def make_exchange(
    route: Channel,
    rows: Channel,
    gradients: Channel,
    memory: Memory,
    codecs: Codecs = EXACT,
    hosts: Hosts | None = None,
) -> Exchange:
    """Returns the exchange of a world: local for one rank, distributed for several, in two hops if there are hosts."""
    from nestpipe.embedding.exchange.distributed import DistributedExchange
    from nestpipe.embedding.exchange.local import LocalExchange
    from nestpipe.embedding.exchange.two_hops import TwoHopExchange

    if route.size == 1:
        return LocalExchange(memory, codecs)
    if hosts is not None:
        return TwoHopExchange(route, hosts, memory, codecs)
    return DistributedExchange(route, rows, gradients, memory, codecs)
