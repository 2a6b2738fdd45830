"""Replicated tables: every rank has all rows, and updates every row that the global batch touches.

A requester reads rows from its own replica, so no row travels. Gradients travel to the owners of their keys, as those
of other tables do, and the owners add them up. Then each owner sends its sums to all ranks, which apply them alike. So
the replicas stay equal, to the bit, and equal to the rows of the same table without replicas.

Which keys a batch touches, all ranks learn in its route: each owner tells them its list. With several sharding groups
(see union.py), owners and requesters are those of one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.distributed import Channel
from nestpipe.embedding.dedup import RequesterDedup
from nestpipe.embedding.group import TableGroup
from nestpipe.store import match_tables
from nestpipe.store.native import plan_ops

KEY_BYTES = 8


@dataclass(frozen=True)
class TouchedKeys:
    """Keys of one table group whose rows a rank makes resident for a global batch."""

    group: TableGroup
    keys: Tensor
    """Distinct keys, table after table."""
    table_offsets: Tensor
    """[tables + 1] first key of each table."""


@dataclass(frozen=True)
class Replica:
    """The keys of one replicated group that a global batch touches: on all ranks the same, in the same order."""

    touched: TouchedKeys
    positions: Tensor
    """[positions] index in `touched` of each key of this requester."""
    by_owner: Tensor
    """Indices in `touched`, owner after owner, in the order of the owner's keys."""
    owner_counts: NDArray[np.int64]
    """[ranks] keys of each owner."""


def share_keys(
    groups: Sequence[RequesterDedup], owned: Sequence[TouchedKeys], channel: Channel
) -> tuple[list[Replica | None], int]:
    """Tells all ranks the keys of replicated groups. Returns by group what they share, None for groups that are not
    replicated, and the bytes sent to other ranks. owned: the keys that this rank owns, by group."""
    pairs = [(dedup, keys) for dedup, keys in zip(groups, owned, strict=True) if dedup.group.is_replicated]
    if not pairs:
        return [None] * len(groups), 0
    ranks = channel.mesh.sharding_group  # it has all keys together
    sent_counts = torch.cat([keys.table_offsets.diff().int() for _, keys in pairs])
    by_rank = torch.zeros(channel.size, len(sent_counts), dtype=torch.int32)
    by_rank[ranks.start : ranks.stop] = sent_counts
    counts = channel.all_to_all_equal(by_rank)
    sent = torch.cat([keys.keys for _, keys in pairs]).view(torch.uint8)
    sent_sizes = [len(sent) * (rank in ranks) for rank in range(channel.size)]
    sizes = counts.sum(1) * KEY_BYTES
    received = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    channel.all_to_all(sent.repeat(len(ranks)), sent_sizes, received, sizes.tolist())
    by_group = counts.split([len(keys.group.tables) for _, keys in pairs], dim=1)
    lists = split_keys(received, [part.sum(1).numpy().astype(np.int64) for part in by_group])
    replicas = iter(
        _replica(dedup, flat, part.numpy()) for (dedup, _), flat, part in zip(pairs, lists, by_group, strict=True)
    )
    num_bytes = (len(ranks) - 1) * (len(sent) + sent_counts.nbytes)
    return [next(replicas) if dedup.group.is_replicated else None for dedup in groups], num_bytes


def by_table(counts: NDArray[np.int32]) -> Tensor:
    """Returns the place of each key in the order of (table, owner), if the keys are ordered by (owner, table).

    counts: [ranks, tables] keys.
    """
    first_by_table = np.cumsum(counts.T.ravel(), dtype=np.int64).reshape(counts.T.shape).T - counts
    first_by_owner = np.cumsum(counts.ravel(), dtype=np.int64) - counts.ravel()
    shifts = first_by_table.ravel() - first_by_owner
    return torch.from_numpy(np.repeat(shifts, counts.ravel()) + np.arange(int(counts.sum())))


def split_keys(received: Tensor, counts: list[NDArray[np.int64]]) -> list[Tensor]:
    """Returns the keys of each group, rank after rank. counts: [ranks] keys of each group. The message has those of
    each rank, group after group."""
    sizes = np.stack(counts) * KEY_BYTES
    totals = sizes.sum(axis=0)
    starts = np.cumsum(totals) - totals + np.cumsum(sizes, axis=0) - sizes
    lists = []
    for group_sizes, group_starts in zip(sizes, starts, strict=True):
        keys = torch.empty(int(group_sizes.sum()) // KEY_BYTES, dtype=torch.int64)
        plan_ops.copy_runs(received, group_starts, keys, np.cumsum(group_sizes) - group_sizes, group_sizes)
        lists.append(keys)
    return lists


def _replica(dedup: RequesterDedup, keys: Tensor, counts: NDArray[np.int32]) -> Replica:
    """keys: those of all owners. counts: [ranks, tables] keys of each owner."""
    by_owner = by_table(counts)
    touched = TouchedKeys(dedup.group, torch.empty_like(keys), _offsets(counts))
    touched.keys[by_owner] = keys
    rows, own_counts = by_table(dedup.counts.numpy()), dedup.counts.numpy()
    own = torch.empty_like(dedup.keys)
    own[rows] = dedup.keys
    places = match_tables(touched.keys, touched.table_offsets, own, _offsets(own_counts))
    return Replica(touched, places[rows], by_owner, counts.sum(axis=1, dtype=np.int64))


def _offsets(counts: NDArray[np.int32]) -> Tensor:
    """Returns the [tables + 1] first key of each table. counts: [ranks, tables]."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts.sum(axis=0, dtype=np.int64))]))
