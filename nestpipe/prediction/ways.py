"""The ways of training that are simulated, and the operations of each: those that the trainer executes."""

from collections.abc import Iterator
from dataclasses import replace

from nestpipe.pipelining.schedule import WITHOUT_EXCHANGE, Op, operations
from nestpipe.pipelining.stage import COMPUTE
from nestpipe.prediction.work import TWO_HOPS, Way

CROSSING = Way("nested-cross-batch", "nested", cross_batch=True)
SCHEDULE_WAYS = (
    Way("serial", "serial"),
    Way("stale", "inter", is_stale=True),
    Way("inter", "inter"),
    Way("intra", "intra"),
    Way("nested", "nested"),
    CROSSING,
)
"""Ways that nestpipe trains in, stale for experiments only."""


def way_named(name: str) -> Way:
    """Returns one of SCHEDULE_WAYS. The ways of the four schedules have their names."""
    return next(way for way in SCHEDULE_WAYS if way.name == name)


def all_ways(num_groups: int) -> tuple[Way, ...]:
    """Returns the ways of training, and as costs only: 2D sparse parallel as it was published, which averages copies of
    rows, and an All2All in two hops."""
    return (
        *SCHEDULE_WAYS,
        in_groups(CROSSING, num_groups),
        Way("serial-2d", "serial", num_groups=num_groups),
        Way("nested-2d", "nested", num_groups=num_groups),
        Way("serial-two-hops", "serial", exchange=TWO_HOPS),
        Way("nested-two-hops", "nested", exchange=TWO_HOPS),
        Way("nested-cross-batch-two-hops", "nested", cross_batch=True, exchange=TWO_HOPS),
    )


def in_groups(way: Way, num_groups: int) -> Way:
    """Returns a way of training with exchange.replicas."""
    if num_groups == 1:
        return way
    return replace(way, name=f"{way.name}-replicas", num_groups=num_groups, adds_sums=True)


def operations_of(
    way: Way, num_micro_batches: int, num_workers: int, has_issuer: bool = False, has_replicas: bool = False
) -> Iterator[Op]:
    """Yields the operations of an endless run, with what the user's loop does between them on the compute lane: the
    dense optimizer after commit, and other work at the end of a step. has_issuer: one thread issues all exchanges.
    has_replicas: some tables are replicated."""
    schedule = WITHOUT_EXCHANGE.get(way.schedule, way.schedule) if num_workers == 1 else way.schedule
    has_replicas = (has_replicas or way.adds_sums) and num_workers > 1
    kinds = {"cross_batch": way.cross_batch, "has_issuer": has_issuer, "has_replicas": has_replicas}
    for op in operations(schedule, num_micro_batches, **kinds):
        yield op
        if op.stage == "commit":
            yield Op("dense", COMPUTE, op.batch)
        if op.stage == "update":
            yield Op("other", COMPUTE, op.batch)
