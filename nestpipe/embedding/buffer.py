"""The working set of an owner: the records of its owned keys of one batch, and what happens to them.

Consecutive batches have a buffer each, the active one in training and the prefetch buffer of the next. The records of
keys that are in both, the overlap, are copied from one to the other on the device: they are neither retrieved from the
host store for the next batch nor written back after this one.

A buffer on a device has a mirror, pinned host memory of the same shape: records come and go through it by direct
copies, a stretch of slots at a time, while the host store is busy with the next stretch. They go straight to their
slots; what lies between them in a stretch is copied too, and is the overlap's, which is filled in later. There a record
begins at a multiple of 16 bytes, which is what a device reads at once: what follows it up to the next is nobody's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.device.streams import is_accelerator, mark
from nestpipe.device.tally import embedding_memory
from nestpipe.device.transfer import host_empty, upload
from nestpipe.embedding.route import OwnedTable, Route
from nestpipe.embedding.rows import copy_rows
from nestpipe.embedding.table import Table
from nestpipe.store import HostStore, Writer, unique
from nestpipe.store.interface import MOST_ROWS

STRETCH_BYTES = 64 << 20
"""of records that travel to or from a device at a time: enough for all threads of the host store to share in"""
ALIGNMENT = 16
"""bytes, of records on a device"""


@dataclass(frozen=True)
class Overlap:
    """The keys of one table that a batch shares with the batch before it."""

    before: Tensor
    """slots in the buffer of the batch before"""
    here: Tensor
    """slots of the same keys in this one's"""
    on_device: tuple[Tensor, Tensor]
    """both, where the buffers are"""


@dataclass
class Buffer:
    """Slot i has the record of the i-th owned key."""

    table: Table
    keys: Tensor
    records: Tensor
    """[n, num_columns]; on a device with more columns behind them, zeros"""
    num_columns: int
    """of a row and its row state"""
    found: Tensor
    """[n] whether the key has been trained before"""
    mirror: Tensor | None = None
    """host memory of the same shape, for a buffer on a device"""
    seen: Tensor | None = None
    """rows that the model is shown instead of those in `records`; for experiments with stale rows"""

    @property
    def rows(self) -> Tensor:
        return self.records[:, : self.table.dim]

    @property
    def state(self) -> Tensor:
        return self.records[:, self.table.dim : self.num_columns]

    @property
    def record_bytes(self) -> int:
        return self.num_columns * self.records.itemsize

    @property
    def frozen_rows(self) -> Tensor:
        """What requesters get, all through the window."""
        return self.rows if self.seen is None else self.seen


class BufferMemory:
    """Memory for the buffers of one batch, used again for the batch after the next: new memory costs page faults, and
    pinned memory more."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._of_tables: dict[str, tuple[Tensor, Tensor | None]] = {}

    def buffer(self, table: Table, keys: Tensor, num_columns: int) -> Buffer:
        """Of records that are anything yet."""
        records, mirror = self._of_tables.get(table.name, (None, None))
        if records is None or len(records) < len(keys):
            records, mirror = self._new(len(keys) + len(keys) // 4, num_columns, table.dtype)
            self._of_tables[table.name] = (records, mirror)
            embedding_memory.add(records)
        slots, found = slice(len(keys)), torch.ones(len(keys), dtype=torch.bool)
        return Buffer(table, keys, records[slots], num_columns, found, None if mirror is None else mirror[slots])

    def _new(self, num_slots: int, num_columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        if not is_accelerator(self.device):
            return torch.empty(num_slots, num_columns, dtype=dtype), None
        aligned = ALIGNMENT // dtype.itemsize
        shape = (num_slots, -(-num_columns // aligned) * aligned)
        records, mirror = torch.empty(shape, dtype=dtype, device=self.device), host_empty(shape, dtype, self.device)
        for array in (records, mirror):
            array[:, num_columns:] = 0
        return records, mirror


def find_overlap(
    before: Sequence[OwnedTable], here: Sequence[OwnedTable], device: torch.device | None = None
) -> list[Overlap]:
    """Of each table."""
    found = [_find_overlap(one.keys, other.keys) for one, other in zip(before, here, strict=True)]
    there = upload((slots for pair in found for slots in pair), device or torch.device("cpu"))
    return [Overlap(before, here, (there(before), there(here))) for before, here in found]


def _find_overlap(before: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    # The keys of a batch are distinct, and `unique` numbers keys as they come: the first ones keep their slots.
    numbers = unique(torch.cat([before, here]))[1][len(before) :]
    slots = (numbers < len(before)).nonzero().flatten()
    return numbers[slots], slots


def retrieve_rows(
    route: Route, store: HostStore, memory: BufferMemory | None = None, overlap: Sequence[Overlap] | None = None
) -> list[Buffer]:
    """Host store to buffer. Creates nothing: a missing key has its initial record in the buffer only.

    The slots of the overlap are left as they are: sync_overlap fills them.
    """
    memory = memory or BufferMemory()
    overlaps = overlap if overlap is not None else [None] * len(route.owned)
    return [_retrieve(owned, store, memory, o) for owned, o in zip(route.owned, overlaps, strict=True)]


def _retrieve(owned: OwnedTable, store: HostStore, memory: BufferMemory, overlap: Overlap | None) -> Buffer:
    buffer = memory.buffer(owned.table, owned.keys, store.spec(owned.table.name).num_columns)
    rest = None if overlap is None or len(overlap.here) == 0 else _all_but(overlap.here, len(owned.keys))
    if buffer.mirror is None:
        _gather(buffer, store, buffer.records, slice(None), rest)
        return buffer
    for stretch, slots in _stretches(buffer, rest):
        _gather(buffer, store, buffer.mirror, stretch, slots)
        buffer.records[stretch].copy_(buffer.mirror[stretch], non_blocking=True)
    return buffer


def _gather(buffer: Buffer, store: HostStore, records: Tensor, stretch: slice, slots: Tensor | None) -> None:
    """From the store to these slots of host memory; None: all of the stretch."""
    name, keys, records = buffer.table.name, buffer.keys, records[:, : buffer.num_columns]
    if slots is None:
        store.gather_into(name, keys[stretch], records[stretch], None, buffer.found[stretch])
    else:
        buffer.found[slots] = store.gather_into(name, keys[slots], records, slots)


def _scatter(
    buffer: Buffer, store: HostStore | Writer, records: Tensor, stretch: slice, slots: Tensor | None, step: int
) -> None:
    """The way back."""
    name, keys, records = buffer.table.name, buffer.keys, records[:, : buffer.num_columns]
    if slots is None:
        store.scatter_from(name, keys[stretch], records[stretch], None, step)
    else:
        store.scatter_from(name, keys[slots], records, slots, step)


def _stretches(buffer: Buffer, slots: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Slots, ascending (None: all), a stretch at a time: from the first to the last of them, and which they are, or
    None if none is left out."""
    num_slots = max(1, STRETCH_BYTES // (buffer.records.stride(0) * buffer.records.itemsize))
    num_chosen = len(buffer.keys) if slots is None else len(slots)
    for first in range(0, num_chosen, num_slots):
        end = min(first + num_slots, num_chosen)
        if slots is None:
            yield slice(first, end), None
            continue
        stretch = slice(int(slots[first]), int(slots[end - 1]) + 1)
        yield stretch, None if stretch.stop - stretch.start == end - first else slots[first:end]


def sync_overlap(before: Sequence[Buffer], here: Sequence[Buffer], overlap: Sequence[Overlap]) -> None:
    """Record for record, row and row state, from the active buffer to the prefetch buffer."""
    for source, target, shared in zip(before, here, overlap, strict=True):
        copy_rows(source.records, shared.on_device[0], target.records, shared.on_device[1])


def room_error(buffers: Sequence[Buffer], before: Sequence[Buffer], store: HostStore) -> ValueError | None:
    """Why these rows, and those of the batch before that are not written back yet, will not all have room."""
    for i, buffer in enumerate(buffers):
        table = buffer.table
        if table.frozen:
            continue
        keys = [b.keys for b in (buffer, *before[i : i + 1])]
        limit = table.max_rows or MOST_ROWS
        num_rows = store.size(table.name)
        if num_rows + sum(map(len, keys)) <= limit:  # there is room even if every key is new
            continue
        needed = num_rows + int((~store.find(table.name, unique(torch.cat(keys))[0])).sum())
        if needed > limit:
            most, remedy = f"the {limit} that a table can have on one rank", "Use more ranks"
            if table.max_rows is not None:
                most, remedy = f"its max_rows = {limit}", "Raise max_rows, or use more ranks"
            return ValueError(
                f"table {table.name!r} would have {needed} rows on this rank, more than {most}; nothing of this step "
                f"was applied. {remedy}"
            )
    return None


def update_rows(
    buffers: Sequence[Buffer], gradients: Sequence[Tensor | None], step: int, is_masked: Tensor | None = None
) -> None:
    """The row optimizer, once for each owned key, even where the gradient is zero. `step` counts from 1."""
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if gradient is not None:
            buffer.table.optimizer.apply(buffer.rows, buffer.state, gradient, step, is_masked)


def write_back(
    buffers: Sequence[Buffer], store: HostStore | Writer, step: int, slots: Sequence[Tensor | None] | None = None
) -> None:
    """Buffer to host store, all slots of a table or those named; a key exists from here on."""
    for buffer, chosen in zip(buffers, slots or [None] * len(buffers), strict=True):
        if buffer.table.frozen:
            continue
        if buffer.mirror is not None:
            _write_back_from_device(buffer, buffer.mirror, store, step, chosen)
        else:
            _scatter(buffer, store, buffer.records, slice(None), chosen, step)


def _write_back_from_device(
    buffer: Buffer, mirror: Tensor, store: HostStore | Writer, step: int, chosen: Tensor | None
) -> None:
    on_the_way = []
    for stretch, slots in _stretches(buffer, chosen):
        mirror[stretch].copy_(buffer.records[stretch], non_blocking=True)
        on_the_way.append((mark(buffer.records.device), stretch, slots))
    for moment, stretch, slots in on_the_way:
        if moment is not None:
            moment.synchronize()
        _scatter(buffer, store, mirror, stretch, slots, step)


def leaving(buffers: Sequence[Buffer], overlap_with_next: Sequence[Overlap]) -> list[Tensor]:
    """The slots of each table that the next batch does not need."""
    return [_all_but(o.before, len(b.keys)) for b, o in zip(buffers, overlap_with_next, strict=True)]


def _all_but(slots: Tensor, num_slots: int) -> Tensor:
    others = torch.ones(num_slots, dtype=torch.bool)
    others[slots] = False
    return others.nonzero().flatten()
