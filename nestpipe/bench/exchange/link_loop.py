"""Training loops that count, by their plans, what their ranks send to other hosts."""

import torch

from nestpipe.bench.network.loop import Loop
from nestpipe.embedding.plan_parts import Plan
from nestpipe.embedding.travel import MessageSizes

RANKS_PER_HOST = 2
LINK_FIELDS = ("link_row_bytes", "link_gradient_bytes", "link_sum_bytes")
"""Bytes that a rank sends to other hosts in a step: rows, gradients, and sums of replicas."""


class LinkLoop(Loop):
    """A Loop with LINK_FIELDS."""

    _planned = torch.zeros(3, dtype=torch.float64)
    """Bytes to other hosts since the turn began."""

    def turn(self, num_steps: int) -> dict[str, float]:
        """See Loop. Bytes are means over all steps of the turn, and over ranks."""
        self._planned = torch.zeros(3, dtype=torch.float64)
        fields = super().turn(num_steps)
        own = self._planned / (num_steps + 1)
        self.world.control.all_reduce_sum(own)
        return fields | dict(zip(LINK_FIELDS, (own / self.world.size).tolist(), strict=True))

    def _step(self) -> None:
        routed = self._next.state.routed
        super()._step()
        if routed is not None and routed.plan is not None:
            self._planned += torch.tensor(planned_bytes(routed.plan, self.world.rank), dtype=torch.float64)


def planned_bytes(plan: Plan, rank: int) -> list[int]:
    """Returns the bytes of rows, of gradients and of sums of replicas that a rank sends to other hosts."""
    returns = plan.returns
    assert returns is not None
    sums = [part.sums_out for part in (returns.replica_sums, returns.late_replica_sums) if part is not None]
    return [
        sum(_to_other_hosts(sizes, rank) for sizes in kind)
        for kind in ([plan.sends.rows_out], [returns.gradients_out], sums)
    ]


def _to_other_hosts(sizes: MessageSizes, rank: int) -> int:
    host = rank // RANKS_PER_HOST
    return sum(size for part in sizes.sizes for to, size in enumerate(part) if to // RANKS_PER_HOST != host)
