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
    if len({header.names_hash for header in headers if header.has_batch}) > 1:
        names = sorted(request.weights)
        raise channel.watch.agreed(ValueError(f"the ranks' batches name different losses; this one has {names}"))

    num_micro_batches = len(request.num_samples)
    mask_bytes = (num_micro_batches + 7) // 8
    parts = [torch.cat([_encode_keys(table, rank) for table in request.tables]) for rank in range(channel.size)]
    receive_bytes = [sum(row) * (8 + mask_bytes) for row in counts_here]
    messages = channel.all_to_all(parts, receive_bytes)
    owned = _decode_keys(request, messages, counts_here, num_micro_batches)
    totals = [sum(weights) for weights in zip(*(header.weights for header in headers), strict=True)]
    return Route(
        request=request,
        owned=owned,
        weights=dict(zip(sorted(request.weights), totals, strict=False)),
        is_step=any(total > 0 for total in totals),
        num_samples=sum(header.num_samples for header in headers),
        key_bytes=sum(part.numel() for rank, part in enumerate(parts) if rank != channel.rank),
    )


def _encode_keys(table: TableRequest, owner: int) -> Tensor:
    """The keys of one owner, then for each the micro-batches that use it, a bit each."""
    first = sum(table.counts[:owner])
    part = slice(first, first + table.counts[owner])
    masks = np.packbits(table.uses[part].numpy(), axis=1)
    return torch.cat([table.keys[part].view(torch.uint8), torch.from_numpy(masks).flatten()])


def _decode_keys(
    request: Request, messages: list[Tensor], counts: list[list[int]], num_micro_batches: int
) -> list[OwnedTable]:
    mask_bytes = (num_micro_batches + 7) // 8
    keys: list[list[Tensor]] = [[] for _ in request.tables]
    uses: list[list[Tensor]] = [[] for _ in request.tables]
    for message, table_counts in zip(messages, counts, strict=True):
        sizes = [size for count in table_counts for size in (8 * count, mask_bytes * count)]
        pieces = message.split(sizes)
        for t, count in enumerate(table_counts):
            keys[t].append(pieces[2 * t].clone().view(torch.int64))
            masks = pieces[2 * t + 1].view(count, mask_bytes).numpy()
            bits = np.unpackbits(masks, axis=1, count=num_micro_batches)
            uses[t].append(torch.from_numpy(bits).bool())
    owned = []
    for t, table in enumerate(request.tables):
        distinct, slots = unique(torch.cat(keys[t]))
        owned.append(OwnedTable(table.table, distinct, list(slots.split([len(k) for k in keys[t]])), uses[t]))
    return owned
