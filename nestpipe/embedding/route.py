"""Route: each owner learns which of its keys the global batch needs, who needs them, when. Moves keys, never rows."""

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestpipe.distributed import Channel
from nestpipe.embedding.request import MOST_LOSSES, Request, TableRequest
from nestpipe.embedding.table import Table
from nestpipe.store import unique


@dataclass(frozen=True)
class OwnedTable:
    """What an owner knows of one table in one batch."""

    table: Table
    keys: Tensor
    """[n] distinct owned keys of the global batch, in order of requester rank, then position: slot i is the i-th"""
    slots: list[Tensor]
    """for each requester, slot of each of its keys, in order of position"""
    uses: list[Tensor]
    """for each requester, [its keys, num_micro_batches] bool"""


@dataclass(frozen=True)
class Route:
    request: Request
    owned: list[OwnedTable]
    weights: dict[str, float]
    """of the global batch, by the names of this rank's batch"""
    is_step: bool
    """whether any weight is positive; otherwise there is nothing to train on"""
    num_samples: int
    """of the global batch"""
    key_bytes: int
    """sent to other ranks"""


@dataclass(frozen=True)
class Header:
    """What every rank tells every rank before the keys."""

    has_batch: bool
    has_error: bool
    num_samples: int
    names_hash: int
    """of the names of the losses, which must be the same on every rank that has a batch"""
    weights: list[float]
    """by name, zeros behind them"""

    SIZE = 4 + MOST_LOSSES

    @staticmethod
    def of(request: Request) -> "Header":
        names = sorted(request.weights)
        weights = [request.weights[name] for name in names] + [0.0] * (MOST_LOSSES - len(names))
        return Header(request.has_batch, False, sum(request.num_samples), zlib.crc32(repr(names).encode()), weights)

    def encode(self) -> list[int]:
        bits = np.array(self.weights, dtype=np.float64).view(np.int64).tolist()
        return [int(self.has_batch), int(self.has_error), self.num_samples, self.names_hash, *bits]

    @staticmethod
    def decode(numbers: list[int]) -> "Header":
        weights = np.array(numbers[4:], dtype=np.int64).view(np.float64).tolist()
        return Header(bool(numbers[0]), bool(numbers[1]), numbers[2], numbers[3], weights)

    @staticmethod
    def of_error() -> "Header":
        return Header(False, True, 0, 0, [0.0] * MOST_LOSSES)


def route_keys(request: Request | Exception, num_tables: int, channel: Channel) -> Route | None:
    """Exchanges keys. None when no rank has a batch: the end of data.

    An exception instead of a request stops all ranks here: this one raises it, the others a RankError that quotes it.
    """
    header = Header.of_error() if isinstance(request, Exception) else Header.of(request)
    counts = [[0] * channel.size] * num_tables if isinstance(request, Exception) else [t.counts for t in request.tables]
    sent = torch.cat([torch.tensor([header.encode()] * channel.size), torch.tensor(counts).T], dim=1)  # a row per owner
    received = channel.all_to_all_equal(sent)
    headers = [Header.decode(row) for row in received[:, : Header.SIZE].tolist()]
    if any(header.has_error for header in headers):
        failed = [rank for rank, header in enumerate(headers) if header.has_error]
        channel.raise_agreed(request if isinstance(request, Exception) else None, failed)
    assert not isinstance(request, Exception)
    counts_here = received[:, Header.SIZE :].tolist()  # [requester, table]
    if not any(header.has_batch for header in headers):
        return None
    weighted = [header for header in headers if any(weight > 0 for weight in header.weights)]
    if len({header.names_hash for header in weighted}) > 1:
        names = sorted(request.weights)
        raise channel.watch.agreed(ValueError(f"the ranks' batches name different losses; this one has {names}"))

    requested, key_bytes = _exchange_keys(request, counts_here, channel)
    owned = [_owned_table(table.table, [of[t] for of in requested]) for t, table in enumerate(request.tables)]
    totals = [sum(weights) for weights in zip(*(header.weights for header in headers), strict=True)]
    return Route(
        request=request,
        owned=owned,
        weights=dict(zip(sorted(request.weights), totals, strict=False)),
        is_step=any(total > 0 for total in totals),
        num_samples=sum(header.num_samples for header in headers),
        key_bytes=key_bytes,
    )


Requested = tuple[Tensor, Tensor]
"""The keys of one table that a requester wants from this owner, and their uses."""


def _exchange_keys(request: Request, counts: list[list[int]], channel: Channel) -> tuple[list[list[Requested]], int]:
    """For each requester and table; and the bytes sent. What this rank wants from itself is not made into a message."""
    num_micro_batches = len(request.num_samples)
    key_bytes = 8 + (num_micro_batches + 7) // 8
    parts = [torch.empty(0, dtype=torch.uint8)] * channel.size
    receive_bytes = [0] * channel.size
    others = [rank for rank in range(channel.size) if rank != channel.rank]
    for rank in others:
        parts[rank] = torch.cat([_encode_keys(table, rank) for table in request.tables])
        receive_bytes[rank] = sum(counts[rank]) * key_bytes
    requested = [[table.of_owner(channel.rank) for table in request.tables]] * channel.size
    send_bytes = [part.numel() for part in parts]
    received = torch.empty(sum(receive_bytes), dtype=torch.uint8)
    channel.all_to_all(torch.cat(parts), send_bytes, received, receive_bytes)
    messages = received.split(receive_bytes)
    for rank in others:
        requested[rank] = _decode_keys(messages[rank], counts[rank], num_micro_batches)
    return requested, sum(send_bytes)


def _encode_keys(table: TableRequest, owner: int) -> Tensor:
    """The keys of one owner, then for each the micro-batches that use it, a bit each."""
    keys, uses = table.of_owner(owner)
    masks = np.packbits(uses.numpy(), axis=1)
    return torch.cat([keys.view(torch.uint8), torch.from_numpy(masks).flatten()])


def _decode_keys(message: Tensor, counts: list[int], num_micro_batches: int) -> list[Requested]:
    """For each table, from one requester's message."""
    mask_bytes = (num_micro_batches + 7) // 8
    pieces = message.split([size for count in counts for size in (8 * count, mask_bytes * count)])
    decoded = []
    for count, keys, masks in zip(counts, pieces[::2], pieces[1::2], strict=True):
        bits = np.unpackbits(masks.view(count, mask_bytes).numpy(), axis=1, count=num_micro_batches)
        decoded.append((keys.clone().view(torch.int64), torch.from_numpy(bits).bool()))
    return decoded


def _owned_table(table: Table, requested: list[Requested]) -> OwnedTable:
    """From what each requester sent."""
    keys = [keys for keys, _ in requested]
    counts = [len(k) for k in keys]
    if max(counts) == sum(counts):  # of one requester only: they are distinct
        distinct = keys[counts.index(max(counts))]
        slots = torch.arange(len(distinct))
    else:
        distinct, slots = unique(torch.cat(keys))
    return OwnedTable(table, distinct, list(slots.split(counts)), [uses for _, uses in requested])
