"""The keys of a global batch over all sharding groups (2D sparse parallel).

Requesters ask the owners in their own sharding group, so an owner knows the keys that its group needs. Its replicas
need others of the same shard. All of them apply the updates of the whole global batch, so each needs the union: it
makes the rows of all these keys resident, and exchange across batches compares unions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.distributed import Channel
from nestpipe.distributed.mesh import Mesh
from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.replica import KEY_BYTES, TouchedKeys, split_keys
from nestpipe.store.native import plan_ops


@dataclass(frozen=True)
class UnionKeys:
    """The keys of one table group that the sharding groups need, on a rank that owns them: on all of its replica group
    the same, in the same order."""

    touched: TouchedKeys
    """The union of all sharding groups' keys."""
    places: Tensor
    """Indices in the union of the keys of each sharding group, group after group, ascending in each."""
    counts: NDArray[np.int64]
    """[replicas] keys of each sharding group."""
    positions: Tensor
    """Index in the union of each key of this rank's own sharding group."""
    mesh: Mesh


def unite_keys(owned: Sequence[TouchedKeys], channel: Channel) -> tuple[list[UnionKeys], int]:
    """Tells the replica group the keys that this rank's sharding group needs, and learns those of the others. Returns
    the unions by group, and the bytes sent to other ranks. owned: keys of this rank's sharding group."""
    mesh = channel.mesh
    own_counts = torch.cat([keys.table_offsets.diff().int() for keys in owned])
    counts = gather_from_replicas(own_counts, [own_counts.nbytes] * mesh.num_replicas, channel).view(torch.int32)
    by_group = counts.view(mesh.num_replicas, -1).split([len(keys.group.tables) for keys in owned], dim=1)
    own_keys = torch.cat([keys.keys for keys in owned])
    sizes = counts.view(mesh.num_replicas, -1).sum(1) * KEY_BYTES
    received = gather_from_replicas(own_keys, sizes.tolist(), channel)
    lists = split_keys(received, [part.sum(1).numpy().astype(np.int64) for part in by_group])
    unions = [
        _unite(keys.group, flat, part.contiguous(), mesh)
        for keys, flat, part in zip(owned, lists, by_group, strict=True)
    ]
    return unions, (mesh.num_replicas - 1) * (own_keys.nbytes + own_counts.nbytes)


def gather_from_replicas(data: Tensor, sizes: list[int], channel: Channel) -> Tensor:
    """Returns the bytes of every rank of the replica group, in its order. All ranks call it. sizes: those of each."""
    sent, arriving = [0] * channel.size, [0] * channel.size
    for rank, size in zip(channel.mesh.replica_group, sizes, strict=True):
        sent[rank], arriving[rank] = data.nbytes, size
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    channel.all_to_all(data.view(torch.uint8).repeat(len(sizes)), sent, received, arriving)
    return received


def _unite(group: TableGroup, keys: Tensor, counts: Tensor, mesh: Mesh) -> UnionKeys:
    """keys: those of all sharding groups, group after group. counts: [replicas, tables] keys of each."""
    distinct, index, table_counts = plan_ops.owner_dedup(keys, counts)
    offsets = torch.cat([table_counts.new_zeros(1), table_counts.cumsum(0)])
    by_replica = counts.sum(1).long()
    numbers = torch.repeat_interleave(torch.arange(len(by_replica)), by_replica)
    num_keys = max(1, len(distinct))
    places = (numbers * num_keys + index).sort().values % num_keys
    first = int(by_replica[: mesh.replica].sum())
    positions = index[first : first + int(by_replica[mesh.replica])]
    return UnionKeys(TouchedKeys(group, distinct, offsets), places, by_replica.numpy(), positions, mesh)
