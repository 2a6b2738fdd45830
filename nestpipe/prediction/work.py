"""What an operation costs, and what decides it: the way of training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nestpipe.pipelining.schedule import Op

Times = NDArray[np.float64]
"""Milliseconds, one number for each worker."""

DIRECT, TWO_HOPS = "direct", "two_hops"
"""Ways of an All2All: straight to every worker, or by hosts (nodes): inside them and between them."""


@dataclass(frozen=True)
class Work:
    """Cost of an operation, in milliseconds."""

    local_ms: float | Times = 0.0
    """Work of a worker alone, which jitter makes longer. An array has a number for each worker."""
    is_collective: bool = False
    """True if it goes on only when all workers have done their local work. It then ends for all of them at once."""
    latency_ms: float = 0.0
    """Part of a collective that takes no bandwidth."""
    transfer_ms: float = 0.0
    """Part of a collective that takes the whole bandwidth. Collectives that run at the same time share it."""


Cost = Callable[[Op], Work]
"""Returns the cost of an operation."""


class Jitter(Protocol):
    """Makes the own work of workers longer or shorter."""

    @property
    def is_none(self) -> bool:
        """Returns whether all workers take the same time."""

    def factors(self, op: Op) -> Times:
        """Returns the factor of each worker's own work in an operation."""


@dataclass(frozen=True)
class Way:
    """A way of training that is simulated."""

    name: str
    schedule: str
    """Schedule whose list of operations is played."""
    is_stale: bool = False
    """Rows that the last step has changed arrive one step late, so nothing is copied between batches."""
    cross_batch: bool = False
    """Early rows and late gradients are exchanged across the boundary of two batches."""
    exchange: str = DIRECT
    num_groups: int = 1
    """Groups of workers that have a copy of all rows each (2D sparse parallel). Rows travel inside a group only."""
    adds_sums: bool = False
    """Groups exchange sums of gradients, so that their copies stay equal: exchange.replicas."""

    @property
    def replicas(self) -> int:
        """Returns the copies of a row that the same updates keep equal."""
        return self.num_groups if self.adds_sums else 1
