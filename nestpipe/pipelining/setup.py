"""What a pipeline needs, by its options and its world."""

from collections.abc import Iterator
from warnings import warn

from nestpipe.distributed import World
from nestpipe.embedding.budget import DeviceBudget
from nestpipe.embedding.capacity import Capacity
from nestpipe.embedding.exchange.local import are_read_in_place
from nestpipe.embedding.group import FeatureGroups
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.row_pool import RowPool
from nestpipe.embedding.table import AUTO
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.replicas import refuse_with_replicas
from nestpipe.pipelining.schedule import OVERLAPPING, WINDOWED, Op, operations
from nestpipe.store.interface import RowStore


def operations_of(
    world: World, options: PipelineOptions, features: FeatureGroups, schedule: str, steps: int | None, crosses: bool
) -> Iterator[Op]:
    """Returns the operations of a pipeline. crosses: rows and gradients are exchanged across batches."""
    return operations(
        schedule,
        options.num_micro_batches,
        steps,
        cross_batch=crosses,
        has_issuer=world.issuer is not None,
        has_replicas=_has_replicas(world, options, features),
    )


def check_combinable(world: World, options: PipelineOptions, features: FeatureGroups) -> None:
    """Refuses places that nobody has chosen, and what does not combine with features that are pooled at the owner, or
    with two hops."""
    for name, feature in features.features.items() if world.size > 1 else ():
        if AUTO in (feature.table.placement, getattr(feature, "where", None)):
            raise ValueError(
                f'feature {name!r}: only a Trainer chooses `where` and placement if they are "auto"; in a loop of your '
                "own, set another value"
            )
    names = ", ".join(features.bag_places)
    if names and options.device_budget_bytes is not None:
        raise ValueError(
            f"memory.device_budget_bytes does not count partial sums of features that are pooled at the owner ({names})"
            '; leave it unset, or set where = "requester"'
        )
    if names and options.stale:
        raise ValueError(
            f"pipeline.stale does not combine with features that are pooled at the owner ({names}); set where = "
            '"requester"'
        )
    way = "exchange.replicas" if world.mesh.num_replicas > 1 else "exchange.hosts" if world.hosts is not None else None
    if names and way is not None:
        raise ValueError(
            f'{way} does not combine with features that are pooled at the owner ({names}); set where = "requester"'
        )
    _check_hosts(world, options, features)


def _has_replicas(world: World, options: PipelineOptions, features: FeatureGroups) -> bool:
    """Returns whether ranks with the same rows exchange sums. Refuses options that do not combine with that."""
    refuse_with_replicas(world, options)
    replicas = world.mesh.num_replicas
    names = [name for group in features.groups if group.is_replicated for name in group.names]
    if not names:
        return replicas > 1
    if options.device_budget_bytes is not None:
        raise ValueError(
            f"memory.device_budget_bytes does not count the rows of replicated tables ({', '.join(names)}); leave it "
            'unset, or set placement = "sharded"'
        )
    if options.stale:
        raise ValueError(
            f'pipeline.stale does not combine with replicated tables ({", ".join(names)}); set placement = "sharded"'
        )
    trains_replicated = any(group.is_replicated and not group.frozen for group in features.groups)
    return replicas > 1 or (world.size > 1 and trains_replicated)


def _check_hosts(world: World, options: PipelineOptions, features: FeatureGroups) -> None:
    """Refuses options that do not combine with an exchange in two hops."""
    if world.hosts is None:
        return
    refused = {
        'exchange.window = "resend"': options.window == "resend",
        "pipeline.stale": options.stale,
        "memory.device_budget_bytes": options.device_budget_bytes is not None,
        'placement = "replicated"': any(group.is_replicated for group in features.groups),
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"{name} does not combine with exchange.hosts; leave one of them out (docs/large-clusters.md)"
            )


def can_cross(world: World, options: PipelineOptions) -> bool:
    """Returns whether rows and gradients may be exchanged across batches."""
    if not options.cross_batch or options.stale:
        return False
    if world.issuer is not None and not world.has_reductions:
        if world.rank == 0:
            warn(
                "exchange across batches is off: collectives of DDP or FSDP are outside of the order in which one "
                "thread issues all others on NCCL. To have it, sum dense gradients with a DenseReducer that is made "
                "before the pipeline; cross_batch=False switches this warning off",
                stacklevel=4,
            )
        return False
    return True


def make_budget(
    world: World, options: PipelineOptions, schedule: str, memory: Memory, is_crossing: bool
) -> DeviceBudget | None:
    if options.device_budget_bytes is None:
        return None
    return DeviceBudget(
        options.device_budget_bytes,
        memory,
        is_windowed=schedule in WINDOWED,
        is_overlapping=schedule in OVERLAPPING,
        is_crossing=is_crossing,
        is_staged=world.rows.is_staged,
        is_read_in_place=world.size == 1 and are_read_in_place(memory, options.codecs),
    )


def pool_of(
    world: World,
    options: PipelineOptions,
    features: FeatureGroups,
    store: RowStore,
    memory: Memory,
    pool: RowPool | None,
) -> RowPool:
    """Returns the row pool of a store: that of an earlier pipeline, or a new one."""
    if pool is not None and pool.store is store:
        return pool
    has_budget = options.device_budget_bytes is not None
    capacity = Capacity(options.resident_bytes, world.device, world.num_sharing_device, not has_budget)
    return RowPool(features.groups, store, memory, capacity)
