"""Resident rows: the records of a batch's owned keys, in the memory where they are trained.

Two classes make rows resident. BatchRows (batch_rows.py) keeps nothing between batches. RowPool (row_pool.py) keeps
rows in their slots as long as there is room.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from nestpipe.embedding.group import TableGroup
from nestpipe.embedding.memory import Memory
from nestpipe.embedding.replica import TouchedKeys
from nestpipe.store import Writer
from nestpipe.store.interface import RowStore
from nestpipe.store.native.library import NativeOptimizer


class RowSource(Protocol):
    """Rows of one group of a batch, on a rank that is asked for them."""

    def sent_from(self) -> tuple[Tensor, Tensor | None]:
        """Returns the array of rows that requesters get, and the place of each key in it, None if it is the key's
        index. The rows do not change from the first one sent to the last gradient returned."""


@dataclass(frozen=True)
class StoredUpdate:
    """An update that waits for its batch to settle: it changes records where they are stored."""

    optimizer: NativeOptimizer
    gradient: Tensor
    """[keys, dim]"""


@dataclass
class ResidentRows:
    """The owned keys of one group of a batch, and the slots that hold their records."""

    group: TableGroup
    keys: Tensor
    table_offsets: Tensor
    """[tables + 1] first key of each table."""
    records: Tensor
    """[slots, columns] records of all slots; there may be columns of padding behind a record."""
    slots: Tensor | None = None
    """[keys] slot of each key, in the memory of the records; None if key i has slot i."""
    host_slots: Tensor | None = None
    """`slots` in host memory."""
    can_update_stored: bool = False
    """Whether an update may be done to the stored records instead of these, which are then a copy of no further use."""
    stored_update: StoredUpdate | None = None
    """Update that is done to the stored records when the batch settles."""
    shown: Tensor | None = None
    """[keys, dim] rows that the model sees instead of those in `records`, for experiments with stale rows."""

    def sent_from(self) -> tuple[Tensor, Tensor | None]:
        """See RowSource."""
        if self.shown is not None:
            return self.shown, None
        return self.records[:, : self.group.dim], self.slots

    def copied(self, memory: Memory) -> Tensor:
        """Returns a copy of the records, in order of the keys: [keys, columns]."""
        copy = memory.empty_rows(len(self.keys), self.records.shape[1], self.group.dtype)
        memory.copy_rows(self.records if self.slots is not None else self.records[: len(copy)], self.slots, copy, None)
        return copy[:, : self.group.num_columns]


@dataclass
class ResidentBatch:
    """A batch whose owned rows are resident."""

    groups: list[ResidentRows]
    number: int = 0
    """Number of the batch in the life of its pool."""
    num_retrieved_bytes: int = 0
    """Bytes read from the host store."""
    num_retrieved_keys: int = 0
    num_written_bytes: int = 0
    """Bytes written to the host store to make room for this batch or, without a pool, after it."""
    new_rows: list[Tensor] = field(default_factory=list)
    """[tables] rows of each group that the store does not have, and would have after the batches in flight."""

    @property
    def num_keys(self) -> int:
        return sum(len(rows.keys) for rows in self.groups)


@dataclass(frozen=True)
class Growth:
    """Slots that each group needs before a batch can become resident."""

    num_slots: tuple[int, ...]
    num_bytes: int
    """Memory of all slots of this rank, including those that it may take later."""
    error: ValueError | None = None
    """Reason to refuse the batch."""


class Residence(Protocol):
    """Makes the owned rows of batches resident, and brings them back to the host store.

    growth and grow are called by the route's lane, the others by the host lane, or by any thread when the lanes rest.
    """

    @property
    def is_limited(self) -> bool:
        """Returns whether a batch may be refused: all ranks then agree on it."""

    def open(self, writer: Writer | RowStore) -> None:
        """Begins a run, which alone writes to the store, by this writer."""

    def close(self) -> None:
        """Ends a run."""

    def growth(self, earlier: Sequence[Sequence[TouchedKeys]], current: Sequence[TouchedKeys]) -> Growth:
        """Returns the slots that a batch needs next to those of earlier batches, which are trained before it."""

    def grow(self, growth: Growth) -> None: ...

    def retrieve(self, dedups: Sequence[TouchedKeys]) -> ResidentBatch:
        """Makes the rows of a batch resident. Creates no key in the store: a missing key has its initial record."""

    def room_error(self, batch: ResidentBatch) -> Exception | None:
        """Returns the reason why this rank cannot apply the batch: a table would have too many rows, for example."""

    def settle(self, batch: ResidentBatch, step: int | None) -> None:
        """Takes note that `step` has changed the batch's rows; None if the batch was not applied, and never will be."""

    def expand(self, most_bytes: int | None) -> None:
        """Uses memory that the first step has left free. most_bytes: limit by the device's budget."""

    def flush(self) -> None:
        """Writes every record that is newer than its copy in the host store."""

    def forget(self) -> None:
        """Gives all rows up, without writing them."""

    def forget_replicas(self) -> None:
        """Gives up the rows of replicated groups, which their owners may have changed since. Nothing may be in flight,
        or newer than the store."""


def offsets_within(offsets: Tensor, stretch: slice) -> Tensor:
    """Returns the offsets of the tables in a stretch of a list."""
    within: Tensor = offsets.clamp(stretch.start, stretch.stop) - stretch.start
    return within


def table_full_error(group: TableGroup, num_rows: Tensor) -> ValueError | None:
    """Returns an error if a table would have more rows than it may. num_rows: [tables] rows that it would have."""
    too_many = np.flatnonzero(num_rows.numpy() > group.most_rows)
    if len(too_many) == 0:
        return None
    t = int(too_many[0])
    name, max_rows, limit = group.names[t], group.tables[t].max_rows, int(group.most_rows[t])
    most, remedy = f"the {limit} that a table can have on one rank", "Use more ranks"
    if max_rows is not None:
        most, remedy = f"its max_rows = {limit}", "Raise max_rows, or use more ranks"
    return ValueError(
        f"table {name!r} would have {int(num_rows[t])} rows on this rank, more than {most}; nothing of this step was "
        f"applied. {remedy}"
    )
