"""Training loops that count what their ranks send to other hosts."""

from pathlib import Path

import torch

from nestpipe.bench.network.loop import Loop
from nestpipe.embedding.plan import Plan
from nestpipe.embedding.travel import MessageSizes

RANKS_PER_HOST = 2
LINK_FIELDS = ("link_row_bytes", "link_gradient_bytes", "link_sum_bytes", "link_sent_bytes")
"""Bytes of a step to other hosts: rows, gradients, and sums of replicas, of a rank, by the plan; all that its host has
sent, divided by its ranks, by the counter of its interface."""


class LinkLoop(Loop):
    """A Loop with LINK_FIELDS."""

    _planned = torch.zeros(3, dtype=torch.float64)
    """Bytes to other hosts since the turn began, as planned."""

    def turn(self, num_steps: int) -> dict[str, float]:
        """See Loop. Bytes are means over all steps of the turn, and over ranks."""
        self._planned = torch.zeros(3, dtype=torch.float64)
        before = interface_bytes()
        fields = super().turn(num_steps)
        self.world.control.all_reduce_sum(torch.zeros(1))  # every rank has sent all
        sent = torch.tensor([(interface_bytes() - before) / RANKS_PER_HOST], dtype=torch.float64)
        own = torch.cat([self._planned, sent]) / (num_steps + 1)
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


def interface_bytes() -> int:
    """Returns the bytes that this host has sent through its interfaces, but for those to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
    return sum(int(numbers[8]) for name, numbers in counts.items() if name != "lo")
