"""Plans the exchanges of a batch that was routed, and makes room for its rows. All ranks plan together."""

from collections.abc import Sequence
from dataclasses import replace

from nestpipe.device.tally import embedding_memory
from nestpipe.embedding.budget import DeviceBudget
from nestpipe.embedding.crossing import Crossing
from nestpipe.embedding.exchange import Exchange
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.plan_parts import Marks, Plan
from nestpipe.embedding.replica import TouchedKeys
from nestpipe.embedding.resident import Residence
from nestpipe.embedding.route import Route
from nestpipe.pipelining.batch_state import Routed
from nestpipe.pipelining.options import PipelineOptions


class Planner:
    """Works on the lane of `route`."""

    def __init__(
        self,
        exchange: Exchange,
        memory: Memory,
        residence: Residence,
        options: PipelineOptions,
        budget: DeviceBudget | None,
        crosses: bool,
    ) -> None:
        """crosses: rows and gradients may cross the boundary between two batches."""
        self._exchange = exchange
        self._memory = memory
        self._residence = residence
        self._options = options
        self._budget = budget
        self._crosses = crosses

    def compare(self, before: Routed | None, route: Route) -> Crossing | None:
        """Finds out what crosses the boundary between a batch and the one before it; None if nothing may."""
        if not self._crosses or before is None:
            return None
        has_late, num_threads = self._options.late_gradients, self._options.num_threads
        return self._exchange.compare(before.route, route, has_late, num_threads)

    def plan(self, route: Route, crossing: Crossing | None, in_flight: list[Sequence[TouchedKeys]]) -> Routed:
        """Plans a batch and adds slots for it. in_flight: keys of earlier batches whose slots must stay."""
        early = None
        if crossing is not None:
            early, route = crossing.early, replace(route, key_bytes=route.key_bytes + crossing.num_bytes)
        plan = self._exchange.plan(route, self._options.window, early, has_returns=not self._crosses)
        if plan is not None:
            plan = self._memory.upload(plan)
            embedding_memory.add_all(plan)
        routed = Routed(route, plan)
        self._make_room(routed, in_flight)
        return routed

    def plan_returns(self, routed: Routed, late: list[Marks] | None) -> None:
        """Plans how the gradients of a batch travel, once the next one is known. late: None if none are."""
        if not self._crosses or routed.plan is None:
            return
        returns = self._exchange.plan_returns(
            routed.route, self._options.window, late if self._options.late_gradients else None
        )
        if returns is not None:
            routed.plan.returns = returns = self._memory.upload(returns)
            embedding_memory.add_all(returns)

    def _make_room(self, routed: Routed, in_flight: list[Sequence[TouchedKeys]]) -> None:
        """Adds slots for the batch. Raises on all ranks if it exceeds a limit of one; no slot was added for it then."""
        is_bounded = self._budget is not None or self._residence.is_limited
        if not routed.route.is_step:
            if is_bounded:
                self._exchange.agree(None)
            return
        growth = self._residence.growth(in_flight, routed.route.touched)
        if is_bounded:
            error = growth.error
            if error is None and self._budget is not None:
                error = self._budget.error(routed.route, self._whole_plan(routed), growth.num_bytes)
            self._exchange.agree(error)
        self._residence.grow(growth)

    def _whole_plan(self, routed: Routed) -> Plan | None:
        """Returns the plan, with no gradient late if the next batch has to tell which are."""
        if routed.plan is None or routed.plan.returns is not None:
            return routed.plan
        returns = self._exchange.plan_returns(routed.route, self._options.window, None)
        return replace(routed.plan, returns=returns)
