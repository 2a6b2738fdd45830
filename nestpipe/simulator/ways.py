"""The ways of training that are simulated, and the operations of each: those that the trainer executes."""

import inspect
from collections.abc import Iterator

from nestpipe.pipelining.schedule import WITHOUT_EXCHANGE, Op, operations
from nestpipe.pipelining.stage import COMPUTE
from nestpipe.simulator.work import TWO_HOPS, Way

SCHEDULE_WAYS = (
    Way("serial", "serial"),
    Way("stale", "inter", is_stale=True),
    Way("inter", "inter"),
    Way("intra", "intra"),
    Way("nested", "nested"),
)
"""Ways that nestpipe trains in, stale for experiments only."""


def has_cross_batch() -> bool:
    """Returns whether schedules can exchange rows across the boundary of two batches."""
    return "cross_batch" in inspect.signature(operations).parameters


def all_ways(num_groups: int) -> tuple[Way, ...]:
    """Returns the ways of training, and as costs only: 2D sparse parallel, and an All2All in two hops."""
    across = (Way("nested-cross-batch", "nested", cross_batch=True),) if has_cross_batch() else ()
    return (
        *SCHEDULE_WAYS,
        *across,
        Way("serial-2d", "serial", num_groups=num_groups),
        Way("nested-2d", "nested", num_groups=num_groups),
        Way("serial-two-hops", "serial", exchange=TWO_HOPS),
        Way("nested-two-hops", "nested", exchange=TWO_HOPS),
    )


def operations_of(way: Way, num_micro_batches: int, num_workers: int) -> Iterator[Op]:
    """Yields the operations of an endless run, with what the user's loop does between them on the compute lane: the
    dense optimizer after commit, and other work at the end of a step."""
    schedule = WITHOUT_EXCHANGE.get(way.schedule, way.schedule) if num_workers == 1 else way.schedule
    more = {"cross_batch": True} if way.cross_batch else {}
    for op in operations(schedule, num_micro_batches, **more):
        yield op
        if op.stage == "commit":
            yield Op("dense", COMPUTE, op.batch)
        if op.stage == "update":
            yield Op("other", COMPUTE, op.batch)
