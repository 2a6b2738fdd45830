"""The route of a batch in two hops: requesters tell relays, relays tell owners. See hop_keys.py."""

from collections.abc import Sequence

import torch

from nestpipe.distributed import Channel, Notice
from nestpipe.distributed.hosts import Hop, Hosts
from nestpipe.embedding.crossing import Crossing, exchange_marks, owned_marks
from nestpipe.embedding.dedup import BatchDedup
from nestpipe.embedding.hop_keys import HopKeys, keys_between, keys_inside
from nestpipe.embedding.plan_parts import Marks
from nestpipe.embedding.route import Hops, OwnerDedup, Route, agree, exchange_keys, meet


def route_by_hosts(batch: BatchDedup | Exception, channel: Channel, hosts: Hosts, notice: Notice) -> Route | None:
    """Exchanges keys as route_keys does. channel: that of all ranks."""
    met = meet(batch, (), channel, notice)
    if met is None:
        return None
    batch, agreed, _ = met
    inside = [keys_inside(dedup, hosts.map) for dedup in batch.groups]
    relayed, _ = _asked(inside, hosts.inside, batch.num_micro_batches)
    num_hosts = hosts.between.size
    between = [
        keys_between(keys.group, keys.keys, keys.table_offsets, keys.key_index, keys.uses, num_hosts)
        for keys in relayed
    ]
    owner_dedups, key_bytes = _asked(between, hosts.between, batch.num_micro_batches)
    hops = [Hops(*parts) for parts in zip(inside, relayed, between, strict=True)]
    return agreed.route(batch, owner_dedups, key_bytes, [None] * len(hops), hops)


def _asked(groups: Sequence[HopKeys], hop: Hop, num_micro_batches: int) -> tuple[list[OwnerDedup], int]:
    """Returns the keys that the ranks of a hop ask this one for, by group, and the bytes sent."""
    sent = torch.cat([group.counts for group in groups], dim=1)
    received = hop.route.all_to_all_equal(sent)
    counts = [part.contiguous() for part in received.split([group.counts.shape[1] for group in groups], dim=1)]
    return exchange_keys(groups, counts, hop.route, num_micro_batches)


def compare_by_hosts(
    earlier: Route, later: Route, channel: Channel, hosts: Hosts, has_late: bool, num_threads: int
) -> Crossing:
    """Finds out what may cross the boundary of two batches, as crossing.compare does. Owners answer relays, and these
    answer the ranks of their hosts."""
    assert later.hops is not None
    assert earlier.hops is not None
    owned, error = owned_marks(earlier, later, has_late, num_threads)
    hops = [*later.hops, *earlier.hops]
    owners = [*later.owner_dedups, *earlier.owner_dedups]
    between = list(zip([group.between for group in hops], owners, strict=True))
    inside = [(group.inside, group.relayed) for group in hops]
    relayed, num_bytes, failed = exchange_marks(between, owned, hosts.between.route, error is not None)
    has_failed = error is not None or len(failed) > 0
    received, _, failed = exchange_marks(inside, relayed, hosts.inside.route, has_failed)
    if has_failed or len(failed) > 0:  # all ranks know by now that one has, but not which
        agree(error, channel)
    marks = [Marks(*each) for each in zip(relayed, owned, map(Marks, received, relayed), strict=True)]
    num_groups = len(later.owner_dedups)
    return Crossing(marks[:num_groups], marks[num_groups:], num_bytes)
