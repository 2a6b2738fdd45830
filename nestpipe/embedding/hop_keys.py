"""The keys of a batch on the two hops of an exchange by hosts.

Between hosts, only ranks at the same place in their hosts exchange. So the rank of a host that is at the owner's place
is the **relay** of its host for that owner's keys: the other ranks of the host ask it, and it asks the owner, once for
each key. On the owner's own host, the relay is the owner. The work is spread as evenly as the keys are.

Inside the host a rank asks relays, place by place; each relay gets keys by (owner's host, table), finds the distinct
ones, and so has the keys in the order in which it asks the owners.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.distributed.host_map import HostMap
from nestpipe.embedding.dedup import RequesterDedup
from nestpipe.embedding.group import TableGroup
from nestpipe.store import group_by_row


@dataclass(frozen=True)
class HopKeys:
    """Keys of one table group that this rank asks for on one hop, in order of (asked rank, table)."""

    group: TableGroup
    keys: Tensor
    counts: Tensor
    """[ranks of the hop, tables] int32: keys of each table that each rank is asked for. Inside a host, a table counts
    once for each host of an owner."""
    uses: Tensor
    """[n, bytes] bits of the micro-batches that use each key; see RequesterDedup."""
    positions: Tensor | None
    """Position of each key in the requester's dedup, inside a host."""

    @property
    def counts_by_owner(self) -> NDArray[np.int64]:
        """Returns the [ranks of the hop] keys that each rank is asked for."""
        counts: NDArray[np.int64] = self.counts.numpy().sum(axis=1, dtype=np.int64)
        return counts


def keys_inside(dedup: RequesterDedup, host_map: HostMap) -> HopKeys:
    """Returns the keys of a batch as this rank asks the relays of its host for them."""
    by_place = np.array(host_map.by_place)
    counts = dedup.counts.numpy()[by_place]
    lengths, starts = counts.sum(axis=1, dtype=np.int64), np.cumsum(dedup.counts_by_owner) - dedup.counts_by_owner
    shifts = starts[by_place] - (np.cumsum(lengths) - lengths)
    positions = torch.from_numpy(np.repeat(shifts, lengths) + np.arange(len(dedup.keys)))
    by_relay = torch.from_numpy(np.ascontiguousarray(counts.reshape(len(host_map.hosts[0]), -1)))
    return HopKeys(dedup.group, dedup.keys[positions], by_relay, dedup.uses[positions], positions)


def keys_between(
    group: TableGroup, keys: Tensor, table_offsets: Tensor, key_index: Tensor, uses: Tensor, num_hosts: int
) -> HopKeys:
    """Returns the keys that a relay asks owners for. keys, table_offsets: the distinct ones, by (owner's host, table).
    key_index, uses: of each entry, a key that a rank of the host asks for."""
    counts = table_offsets.diff().int().view(num_hosts, -1)
    return HopKeys(group, keys, counts, _uses_of_any(key_index, uses, len(keys)), None)


def _uses_of_any(key_index: Tensor, uses: Tensor, num_keys: int) -> Tensor:
    """Returns the micro-batches in which any rank of the host uses each key."""
    if num_keys == 0:
        return uses[:0]
    starts, _, entries = group_by_row(key_index, None, num_keys, with_occurrences=False)
    by_key = uses.index_select(0, entries).numpy()
    return torch.from_numpy(np.bitwise_or.reduceat(by_key, starts[:-1].numpy(), axis=0))
