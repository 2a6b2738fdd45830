"""Route: tells each owner which of its keys the global batch needs, which ranks need them, and when. Moves no rows.

A rank first sends every rank a header and, for each table, the number of keys that it needs; then the keys, each with a
bit for every micro-batch. The owner dedups once more. With several sharding groups, ranks ask the owners in their own
one; then owners learn the keys of the others (see union.py).
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.distributed import Channel, Notice
from nestpipe.embedding.bags import Bags
from nestpipe.embedding.dedup import MOST_LOSSES, BatchDedup, RequesterDedup
from nestpipe.embedding.group import FeatureGroups, TableGroup
from nestpipe.embedding.hop_keys import HopKeys
from nestpipe.embedding.owned_bags import OwnedBags, ReceivedBags, exchange_bags, own_bags
from nestpipe.embedding.replica import KEY_BYTES, Replica, TouchedKeys, share_keys
from nestpipe.embedding.union import UnionKeys, unite_keys
from nestpipe.store.native import plan_ops


@dataclass(frozen=True)
class OwnerDedup(TouchedKeys):
    """One table group of a global batch, on the rank that owns the keys, in order of (table, requester, position)."""

    key_index: Tensor
    """[entries] index in `keys` of each key that a requester needs, requester after requester."""
    uses: Tensor
    """[entries, bytes] bits of the requester's micro-batches that use the key."""
    entry_counts: NDArray[np.int64]
    """[ranks] entries of each requester."""
    union: UnionKeys | None = None
    """With several sharding groups: `keys` are those of all of them, in the order of the union. Entries are those of
    this rank's own group."""
    bags: OwnedBags | None = None
    """What this rank adds up for features that are pooled at the owner. Such a key has no entry of theirs."""


@dataclass(frozen=True)
class Hops:
    """One table group of a batch whose rows travel in two hops; see hop_keys.py. The owner's part is its OwnerDedup."""

    inside: HopKeys
    """Keys that this rank asks the relays of its host for."""
    relayed: OwnerDedup
    """Keys that the ranks of its host ask this rank for."""
    between: HopKeys
    """The same keys, as it asks their owners for them."""


@dataclass(frozen=True)
class Route:
    """A batch whose keys are known to their owners."""

    batch: BatchDedup
    owner_dedups: list[OwnerDedup]
    """Keys that this rank owns, by group."""
    weights: dict[str, float]
    """Weights of the global batch, by the names in this rank's batch."""
    is_step: bool
    """True if any weight is positive; otherwise there is nothing to train on."""
    num_samples: int
    """Samples of the global batch."""
    key_bytes: int
    """Bytes of keys sent to other ranks."""
    is_stop_requested: bool
    """True if any rank asks all ranks to stop."""
    num_saves_written: int
    """Saves that are on disk on every rank."""
    replicas: list[Replica | None]
    """What ranks share of replicated groups, by group; None for other groups, and in a world of one."""
    hops: list[Hops] | None = None
    """Keys on the way between requesters and owners, by group; None if there is one hop."""

    @property
    def touched(self) -> list[TouchedKeys]:
        """Returns the keys whose rows this rank makes resident, by group: those that it owns, or all of the global
        batch."""
        pairs = zip(self.replicas, self.owner_dedups, strict=True)
        return [owner if replica is None else replica.touched for replica, owner in pairs]


class _Header:
    """Header that every rank sends to every rank before the keys: has_batch, has_error, num_samples, a hash of the
    losses' names, is_stop_requested, num_saves_written, and the losses' weights in order of name. All are int64;
    weights are bit patterns of doubles."""

    SIZE = 6 + MOST_LOSSES

    @staticmethod
    def encode(batch: BatchDedup | Exception, notice: Notice) -> NDArray[np.int64]:
        header = np.zeros(_Header.SIZE, dtype=np.int64)
        header[4], header[5] = notice.is_stop_requested, notice.num_saves_written
        if isinstance(batch, Exception):
            header[1] = 1
            return header
        names = sorted(batch.weights)
        header[0], header[2] = batch.has_batch, sum(batch.num_samples)
        header[3] = zlib.crc32(repr(names).encode())
        header[6 : 6 + len(names)] = np.array([batch.weights[name] for name in names]).view(np.int64)
        return header


@dataclass(frozen=True)
class Agreed:
    """The headers of all ranks."""

    numbers: NDArray[np.int64]
    """[ranks, _Header.SIZE] header of each rank."""

    @property
    def failed(self) -> list[int]:
        """Returns the ranks with an error."""
        return np.flatnonzero(self.numbers[:, 1]).tolist()

    @property
    def has_batch(self) -> bool:
        return bool(self.numbers[:, 0].any())

    @property
    def num_samples(self) -> int:
        return int(self.numbers[:, 2].sum())

    @property
    def is_stop_requested(self) -> bool:
        return bool(self.numbers[:, 4].any())

    @property
    def num_saves_written(self) -> int:
        return int(self.numbers[:, 5].min())

    @property
    def weights(self) -> NDArray[np.float64]:
        """Returns the weights, [ranks, losses]."""
        return np.ascontiguousarray(self.numbers[:, 6:]).view(np.float64)

    @property
    def total_weights(self) -> list[float]:
        """Returns the sums over ranks, in order of rank, so that every rank has the same bits."""
        totals: list[float] = np.cumsum(self.weights, axis=0)[-1].tolist()
        return totals

    def route(
        self,
        batch: BatchDedup,
        owner_dedups: list[OwnerDedup],
        key_bytes: int,
        replicas: list[Replica | None],
        hops: list[Hops] | None = None,
    ) -> Route:
        """Returns the route of this rank's batch, once its keys are known to their owners."""
        totals = self.total_weights
        return Route(
            batch=batch,
            owner_dedups=owner_dedups,
            weights=dict(zip(sorted(batch.weights), totals, strict=False)),
            is_step=any(total > 0 for total in totals),
            num_samples=self.num_samples,
            key_bytes=key_bytes,
            is_stop_requested=self.is_stop_requested,
            num_saves_written=self.num_saves_written,
            replicas=replicas,
            hops=hops,
        )

    @property
    def name_the_same_losses(self) -> bool:
        """Returns whether all batches with a weight name the same losses."""
        weighted = (self.weights > 0).any(axis=1)
        return len(np.unique(self.numbers[weighted, 3])) <= 1


def route_keys(
    batch: BatchDedup | Exception, features: FeatureGroups, channel: Channel, notice: Notice
) -> Route | None:
    """Exchanges keys. Returns None at the end of data, when no rank has a batch.

    An exception instead of a batch stops all ranks: this one raises it, the others a RankError that quotes it. notice:
    what this rank tells the others with the batch.
    """
    met = meet(batch, [len(group.tables) for group in features.groups], channel, notice)
    if met is None:
        return None
    batch, agreed, counts = met
    bags = dict(zip(features.bag_groups, batch.bags, strict=True))
    owner_dedups, key_bytes = exchange_keys(batch.groups, counts, channel, batch.num_micro_batches, bags)
    if channel.mesh.num_replicas > 1:
        owner_dedups, union_bytes = _with_unions(owner_dedups, channel)
        key_bytes += union_bytes
    replicas, shared_bytes = share_keys(batch.groups, owner_dedups, channel)
    return agreed.route(batch, owner_dedups, key_bytes + shared_bytes, replicas)


def meet(
    batch: BatchDedup | Exception, tables: Sequence[int], channel: Channel, notice: Notice
) -> tuple[BatchDedup, Agreed, list[Tensor]] | None:
    """Begins the route of a batch on all ranks. Returns the batch, the headers of all ranks and, by group, the [ranks,
    tables] numbers of keys that they need from this rank; None if no rank has a batch. Raises on all ranks if any has
    an exception. tables: number of tables of each group whose numbers of keys are exchanged."""
    agreed, counts = _exchange_counts(batch, tables, channel, notice)
    if agreed.failed:
        channel.raise_agreed(batch if isinstance(batch, Exception) else None, agreed.failed)
    assert not isinstance(batch, Exception)
    if not agreed.has_batch:
        return None
    if not agreed.name_the_same_losses:
        names = sorted(batch.weights)
        raise channel.watch.agreed(ValueError(f"the ranks' batches name different losses; this one has {names}"))
    return batch, agreed, counts


def agree(error: Exception | None, channel: Channel) -> None:
    """Raises on all ranks if any of them has an error."""
    failed = channel.all_to_all_equal(torch.full((channel.size, 1), int(error is not None))).flatten()
    if bool(failed.any()):
        channel.raise_agreed(error, failed.nonzero().flatten().tolist())


def route_alone(batch: BatchDedup | Exception, notice: Notice) -> Route | None:
    """Routes a batch in a world of one: every key is this rank's own, in order of position."""
    if isinstance(batch, Exception):
        raise batch
    if not batch.has_batch:
        return None
    return Route(
        batch=batch,
        owner_dedups=[_owner_dedup(group) for group in batch.groups],
        weights=batch.weights,
        is_step=any(weight > 0 for weight in batch.weights.values()),
        num_samples=sum(batch.num_samples),
        key_bytes=0,
        is_stop_requested=notice.is_stop_requested,
        num_saves_written=notice.num_saves_written,
        replicas=[None] * len(batch.groups),
    )


def _owner_dedup(dedup: RequesterDedup) -> OwnerDedup:
    """Returns the owner's dedup in a world of one, where no rank sends entries."""
    offsets = _offsets(dedup.counts[0].long())
    none = torch.empty(0, dtype=torch.int64)
    return OwnerDedup(dedup.group, dedup.keys, offsets, none, dedup.uses[:0], np.zeros(1, dtype=np.int64))


def _exchange_counts(
    batch: BatchDedup | Exception, tables: Sequence[int], channel: Channel, notice: Notice
) -> tuple[Agreed, list[Tensor]]:
    """Returns the headers of all ranks, and by group the [ranks, tables] numbers of keys they need from this rank."""
    size, header = channel.size, torch.from_numpy(_Header.encode(batch, notice).view(np.int32))
    sent = torch.empty(size, len(header) + sum(tables), dtype=torch.int32)
    sent[:, : len(header)] = header
    if isinstance(batch, Exception):
        sent[:, len(header) :] = 0
    elif tables:
        torch.cat([group.counts for group in batch.groups], dim=1, out=sent[:, len(header) :])
    received = channel.all_to_all_equal(sent)
    numbers = np.ascontiguousarray(received[:, : len(header)].numpy()).view(np.int64)
    counts = [part.contiguous() for part in received[:, len(header) :].split(list(tables), dim=1)] if tables else []
    return Agreed(numbers), counts


class AskedKeys(Protocol):
    """Keys of one group in order of (asked rank, table): RequesterDedup or HopKeys."""

    @property
    def group(self) -> TableGroup: ...
    @property
    def keys(self) -> Tensor: ...
    @property
    def counts(self) -> Tensor: ...
    @property
    def uses(self) -> Tensor: ...


def exchange_keys(
    groups: Sequence[AskedKeys],
    counts: list[Tensor],
    channel: Channel,
    num_micro_batches: int,
    bags: Mapping[int, Bags] | None = None,
) -> tuple[list[OwnerDedup], int]:
    """Returns the dedup of each group by the asked rank, and the bytes sent. A rank sends its own keys in no message.
    counts: [ranks, tables] keys that ranks ask this one for, by group. bags: by number of the group; None if nothing is
    pooled at the owner."""
    mask_bytes = (num_micro_batches + 7) // 8
    sent = _KeyLayout([_rank_sums(group.counts) for group in groups], mask_bytes, channel.rank)
    message = torch.empty(sent.num_bytes, dtype=torch.uint8)
    for g, group in enumerate(groups):
        sent.write(message, g, group)
    arriving = _KeyLayout([_rank_sums(group) for group in counts], mask_bytes, channel.rank)
    received = torch.empty(arriving.num_bytes, dtype=torch.uint8)
    channel.all_to_all(message, sent.sizes.tolist(), received, arriving.sizes.tolist())
    bags = bags or {}
    received_bags, bag_bytes = exchange_bags(list(bags.values()), channel)
    bags_of = dict(zip(bags, received_bags, strict=True))
    dedups = []
    for g, group in enumerate(groups):
        keys, uses = arriving.read(received, g, group, sent.own(g))
        entries = uses, arriving.counts[g]
        dedups.append(_dedup_at_owner(group.group, keys, counts[g], *entries, bags_of.get(g)))
    return dedups, sent.num_bytes + bag_bytes


def _dedup_at_owner(
    group: TableGroup,
    keys: Tensor,
    counts: Tensor,
    uses: Tensor,
    entry_counts: NDArray[np.int64],
    bags: ReceivedBags | None,
) -> OwnerDedup:
    """Dedups the keys of requesters, [ranks, tables] counts of them, and those of bags, as if further ranks asked for
    them."""
    num_entries = len(keys)
    if bags is not None:
        keys, counts = torch.cat([keys, bags.keys]), torch.cat([counts, bags.counts])
    distinct, index, table_counts = plan_ops.owner_dedup(keys, counts)
    owned = None if bags is None else own_bags(bags, index[num_entries:], len(distinct))
    return OwnerDedup(group, distinct, _offsets(table_counts), index[:num_entries], uses, entry_counts, bags=owned)


def _with_unions(owner_dedups: list[OwnerDedup], channel: Channel) -> tuple[list[OwnerDedup], int]:
    """Returns the dedups with the keys of all sharding groups, and the bytes sent."""
    unions, num_bytes = unite_keys(owner_dedups, channel)
    united = []
    for dedup, union in zip(owner_dedups, unions, strict=True):
        keys, offsets = union.touched.keys, union.touched.table_offsets
        index = union.positions.index_select(0, dedup.key_index)
        united.append(replace(dedup, keys=keys, table_offsets=offsets, key_index=index, union=union))
    return united, num_bytes


def _rank_sums(counts: Tensor) -> NDArray[np.int64]:
    sums: NDArray[np.int64] = counts.numpy().sum(axis=1, dtype=np.int64)
    return sums


def _offsets(counts: Tensor) -> Tensor:
    offsets = counts.new_zeros(len(counts) + 1)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


class _KeyLayout:
    """A message of keys: rank after rank, and for each rank, group after group, keys and then their uses."""

    def __init__(self, counts: list[NDArray[np.int64]], mask_bytes: int, own_rank: int) -> None:
        """counts: keys of each rank, this one included, by group."""
        self.counts = counts
        self._mask_bytes = mask_bytes
        self._own_rank = own_rank
        self._sent = [np.where(np.arange(len(group)) == own_rank, 0, group) for group in counts]
        sizes = [group * (KEY_BYTES + mask_bytes) for group in self._sent]
        self.sizes = np.sum(sizes, axis=0)
        """[ranks] bytes."""
        self.num_bytes = int(self.sizes.sum())
        self._starts = np.cumsum(self.sizes) - self.sizes + np.cumsum(sizes, axis=0) - sizes
        """[groups, ranks] start of each part in the message."""

    def own(self, group: int) -> slice:
        """Returns the positions of this rank's own keys in a group."""
        first = int(self.counts[group][: self._own_rank].sum())
        return slice(first, first + int(self.counts[group][self._own_rank]))

    def write(self, message: Tensor, group: int, dedup: AskedKeys) -> None:
        for array, width, starts in self._arrays(group, dedup.keys, dedup.uses):
            plan_ops.copy_runs(array, self._firsts(group) * width, message, starts, self._sent[group] * width)

    def read(self, message: Tensor, group: int, dedup: AskedKeys, own: slice) -> tuple[Tensor, Tensor]:
        """Returns the keys and uses of all requesters. This rank's come from its own dedup."""
        num_keys, target = int(self.counts[group].sum()), self.own(group)
        keys = torch.empty(num_keys, dtype=torch.int64)
        uses = torch.empty(num_keys, self._mask_bytes, dtype=torch.uint8)
        for array, width, starts in self._arrays(group, keys, uses):
            plan_ops.copy_runs(message, starts, array, self._firsts(group) * width, self._sent[group] * width)
        keys[target], uses[target] = dedup.keys[own], dedup.uses[own]
        return keys, uses

    def _arrays(self, group: int, keys: Tensor, uses: Tensor) -> list[tuple[Tensor, int, NDArray[np.int64]]]:
        """Returns each array, its bytes per key, and the start of its parts in the message."""
        starts = self._starts[group]
        return [(keys, KEY_BYTES, starts), (uses, self._mask_bytes, starts + self._sent[group] * KEY_BYTES)]

    def _firsts(self, group: int) -> NDArray[np.int64]:
        return np.cumsum(self.counts[group]) - self.counts[group]
