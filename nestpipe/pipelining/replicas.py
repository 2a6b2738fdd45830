"""Replicas of rows, one in each sharding group: what does not combine with them, and a check that they are equal."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.distributed import World
from nestpipe.embedding.replica import TouchedKeys
from nestpipe.embedding.union import gather_from_replicas
from nestpipe.pipelining.batch_state import BatchState
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.store import hash_keys
from nestpipe.store.interface import RowStore

if TYPE_CHECKING:
    from nestpipe.pipelining.pipeline import Pipeline

BUCKET_SHIFT = 48
"""A bucket is the top 16 bits of a key's hash."""
HASH_BYTES = 16


def refuse_with_replicas(world: World, options: PipelineOptions) -> None:
    """Refuses options that do not combine with several sharding groups."""
    replicas = world.mesh.num_replicas
    if replicas == 1:
        if options.check_replicas > 0:
            raise ValueError(
                f"exchange.check_replicas = {options.check_replicas}, but there are no replicas to compare; set "
                "exchange.replicas (World(replicas=...)) to 2 or more, or exchange.check_replicas to 0"
            )
        return
    if options.device_budget_bytes is not None:
        raise ValueError(
            f"memory.device_budget_bytes does not count the sums that exchange.replicas = {replicas} exchanges; leave "
            "it unset, or set exchange.replicas = 1"
        )
    if options.stale:
        raise ValueError(
            f"pipeline.stale does not combine with exchange.replicas = {replicas}; set exchange.replicas = 1"
        )


def compare_replicas(pipeline: "Pipeline", state: BatchState, num_steps: int) -> None:
    """Compares the rows of a step that has ended, if it is time to. All ranks call it, after num_steps steps."""
    every = pipeline.options.check_replicas
    if every > 0 and num_steps % every == 0 and state.routed is not None:
        pipeline.flush()
        check_replicas(pipeline.world, pipeline.stages.store, state.routed.route.touched, num_steps - 1)


def check_replicas(world: World, store: RowStore, touched: Sequence[TouchedKeys], step: int) -> None:
    """Raises on all ranks if the rows of a step, with their state, differ between replicas. All ranks call it, when the
    store has all rows. touched: keys of the step."""
    channel, num_replicas = world.control, world.mesh.num_replicas
    with world.busy():
        tables = [table for keys in touched for table in _records(store, keys)]
        own = hashlib.sha256()
        for name, keys, records in tables:
            own.update(f"{name}\0{len(keys)}\0".encode() + _bytes(keys) + _bytes(records))
    digest = torch.frombuffer(bytearray(own.digest()), dtype=torch.uint8)
    digests = gather_from_replicas(digest, [len(digest)] * num_replicas, channel).view(num_replicas, -1)
    is_different = torch.tensor([float((digests != digest).any())])
    channel.all_reduce_sum(num_different := is_different.clone())
    if num_different == 0:
        return
    with world.busy():
        hashes = [_row_hash(keys[i], records[i]) for _, keys, records in tables for i in range(len(keys))]
    text = _difference(world, tables, torch.frombuffer(bytearray(b"".join([*hashes, b"\0"])), dtype=torch.uint8))
    failed = channel.all_to_all_equal(is_different.repeat(channel.size, 1)).flatten().nonzero().flatten().tolist()
    error = None
    if is_different:
        error = RuntimeError(
            f"step {step}: {text}. Replicas must be equal, to the bit: a row was written on one rank alone, or its "
            "hardware computes differently. Go on from a checkpoint"
        )
    channel.raise_agreed(error, failed)


_Table = tuple[str, Tensor, Tensor]
"""Name, keys and records."""


def _records(store: RowStore, touched: TouchedKeys) -> Iterator[_Table]:
    group, keys = touched.group, touched.keys
    records = torch.empty(len(keys), group.num_columns, dtype=group.dtype)
    store.gather_tables(group.names, touched.table_offsets, keys, records, None)
    for name, (first, end) in zip(group.names, pairwise(touched.table_offsets.tolist()), strict=True):
        yield name, keys[first:end], records[first:end]


def _difference(world: World, tables: Sequence[_Table], hashes: Tensor) -> str:
    """Says which replicas of which bucket differ. hashes: those of all rows, and one byte."""
    channel, replica_group = world.control, world.mesh.replica_group
    size = torch.tensor([len(hashes)])
    sizes = gather_from_replicas(size, [size.nbytes] * len(replica_group), channel).view(torch.int64)
    received = gather_from_replicas(hashes, sizes.tolist(), channel)
    if (sizes != len(hashes)).any():
        return f"ranks {_listed(replica_group)} have different rows"
    by_rank = received.view(len(replica_group), -1)[:, :-1].reshape(len(replica_group), -1, HASH_BYTES)
    first = 0
    for name, keys, _ in tables:
        rows = by_rank[:, first : first + len(keys)]
        first += len(keys)
        differs = (rows != rows[:1]).any(2).any(0).nonzero().flatten()
        if len(differs) > 0:
            i = int(differs[0])
            bucket = int(hash_keys(name, keys[i : i + 1])[0]) >> BUCKET_SHIFT & 0xFFFF
            equal = [rank for rank, row in zip(replica_group, rows, strict=True) if bool((row[i] == rows[0, i]).all())]
            others = [rank for rank in replica_group if rank not in equal]
            return (
                f"table {name!r}, bucket {bucket}: the row of key {int(keys[i])} on rank {_listed(equal)} is not that "
                f"on rank {_listed(others)} ({len(differs):,} of {len(keys):,} rows differ)"
            )
    return f"ranks {_listed(replica_group)} have different rows"


def _row_hash(key: Tensor, record: Tensor) -> bytes:
    return hashlib.blake2b(_bytes(key.view(1)) + _bytes(record), digest_size=HASH_BYTES).digest()


def _bytes(array: Tensor) -> bytes:
    return array.contiguous().view(torch.uint8).numpy().tobytes()


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
