"""The exchange in two hops: between hosts, and inside each host. See hop_keys.py and docs/large-clusters.md.

Each hop is an exchange like that among all ranks. A relay stands in both: between hosts it is a requester, inside its
host it is the owner of the rows that it has received, and of the gradients that it will send.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from nestpipe.distributed import Channel, Notice
from nestpipe.distributed.hosts import Hosts
from nestpipe.embedding.crossing import Crossing
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.exchange import RowGradients
from nestpipe.embedding.exchange.codec import EXACT, Codecs
from nestpipe.embedding.exchange.distributed import DistributedBatch
from nestpipe.embedding.exchange.requester import make_requesters
from nestpipe.embedding.group import FeatureGroups, TableGroup
from nestpipe.embedding.hop_plan import WINDOW, plan_hop_returns, plan_hop_sends
from nestpipe.embedding.hop_route import compare_by_hosts, route_by_hosts
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.embedding.owned_bags import OwnedBags
from nestpipe.embedding.plan_parts import Marks, Plan, Returns, Sends
from nestpipe.embedding.resident import ResidentRows
from nestpipe.embedding.route import Route, agree


class TwoHopExchange:
    """See Exchange."""

    def __init__(self, route: Channel, hosts: Hosts, memory: Memory, codecs: Codecs) -> None:
        self.size = self.num_owners = route.size
        self._route = route
        self._hosts = hosts
        self._places = hosts.inside.rank, hosts.between.rank
        self._memory = memory
        self._codecs = codecs

    def route(self, batch: BatchDedup | Exception, features: FeatureGroups, notice: Notice) -> Route | None:
        return route_by_hosts(batch, self._route, self._hosts, notice)

    def compare(self, earlier: Route, later: Route, has_late: bool, num_threads: int) -> Crossing:
        return compare_by_hosts(earlier, later, self._route, self._hosts, has_late, num_threads)

    def plan(
        self, route: Route, window: str, early: list[Marks] | None = None, has_returns: bool = True
    ) -> Plan | None:
        sizes = self._codecs.rows.row_bytes, EXACT.rows.row_bytes
        inside, between = plan_hop_sends(route, self._places, *sizes, early)
        returns = self.plan_returns(route, window, None) if has_returns else None
        return Plan(window, between, returns, inside=inside)

    def plan_returns(self, route: Route, window: str, late: list[Marks] | None) -> Returns | None:
        sizes = self._codecs.gradients.row_bytes, EXACT.gradients.row_bytes
        return plan_hop_returns(route, self._places, *sizes, late)

    def agree(self, error: Exception | None) -> None:
        agree(error, self._route)

    def open(self, route: Route, plan: Plan | None, resident: list[ResidentRows] | None) -> "TwoHopBatch":
        assert plan is not None
        return TwoHopBatch(route, plan, resident, self._hosts, self._memory, self._codecs)


class TwoHopBatch:
    """See BatchExchange. Bytes count what travels between hosts."""

    def __init__(
        self,
        route: Route,
        plan: Plan,
        resident: list[ResidentRows] | None,
        hosts: Hosts,
        memory: Memory,
        codecs: Codecs,
    ) -> None:
        assert route.hops is not None
        inside, between = hosts.inside, hosts.between
        num_added = inside.size
        requesters = make_requesters(route.batch, WINDOW, memory, codecs, num_added * between.size, num_added)
        relays = [_Relay(hops.relayed.group, len(hops.relayed.keys), memory) for hops in route.hops]
        self._plan = plan
        self._memory = memory
        self._num_micro_batches = route.batch.num_micro_batches
        ways = inside.rows, inside.gradients
        self._inside = DistributedBatch(requesters, _PlanInside(plan), relays, *ways, memory, EXACT, writes_ahead=False)
        self._between = DistributedBatch(relays, plan, resident, between.rows, between.gradients, memory, codecs)
        self.exceeds = self._inside.exceeds

    @property
    def row_bytes(self) -> int:
        return self._between.row_bytes

    @property
    def gradient_bytes(self) -> int:
        return self._between.gradient_bytes

    def send_early_rows(self) -> None:
        self._between.send_early_rows()
        self._inside.send_early_rows()

    def send_rows(self, micro_batch: int) -> None:
        self._between.send_rows(micro_batch)
        self._inside.send_rows(micro_batch)

    def rows(self, micro_batch: int) -> list[ModelRows]:
        return self._inside.rows(micro_batch)

    def return_gradients(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        self._inside.return_gradients(micro_batch, gradients)
        self._between.return_gradients(micro_batch, self._relay_sums(micro_batch))

    @property
    def has_late_gradients(self) -> bool:
        return self._between.has_late_gradients

    def return_late_gradients(self) -> None:
        self._inside.return_late_gradients()
        part = self._num_micro_batches
        self._between.return_gradients(part, self._relay_sums(part))  # relays have other sums in every part

    def share_sums(self) -> None:
        """Does nothing: there are no replicated tables."""

    def sum_gradients(self) -> list[RowGradients | None]:
        return self._between.sum_gradients()

    def sum_late_gradients(self) -> list[RowGradients | None]:
        return self._between.sum_late_gradients()

    def _relay_sums(self, part: int) -> list[Tensor | None]:
        """Adds up, over the ranks of the host, the gradients that leave it with a part; None for a frozen group."""
        returns = self._plan.returns
        assert returns is not None
        assert returns.relay_sums is not None
        return [
            None if lists.group.frozen else self._memory.sum_rows(self._inside.entries_of(g), sums[part])
            for g, (lists, sums) in enumerate(zip(returns.groups, returns.relay_sums, strict=True))
        ]


class _PlanInside:
    """The part of a plan inside the host. See HopPlan."""

    window = WINDOW
    shares = None
    bags: Mapping[int, OwnedBags] = {}

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def sends(self) -> Sends:
        assert self._plan.inside is not None
        return self._plan.inside

    @property
    def returns(self) -> Returns | None:
        return None if self._plan.returns is None else self._plan.returns.inside


class _Relay:
    """One group on a relay. See Requester and RowSource."""

    def __init__(self, group: TableGroup, num_keys: int, memory: Memory) -> None:
        self._shape = num_keys, group.dim, group.dtype
        self._memory = memory
        self._rows: Tensor | None = None
        """Rows received so far, in order of the relay's keys."""

    def arriving(self, micro_batch: int) -> Tensor:
        if self._rows is None:
            self._rows = self._memory.empty_rows(*self._shape)
        return self._rows

    def gather(self, micro_batch: int) -> None:
        """Does nothing: the rows are handed on from where they arrive."""

    def pop_rows(self, micro_batch: int) -> Tensor:
        raise AssertionError("the ranks of the host get the rows of a relay")

    def collect(self, micro_batch: int, gradient: Tensor | None, exceeds: Tensor) -> Tensor:
        assert gradient is not None
        return gradient

    def sent_from(self) -> tuple[Tensor, None]:
        return self.arriving(0), None
