"""The memory that a worker needs: a formula, with what a trial has measured on one rank.

Of U distinct keys in a worker's batch and W workers, a worker owns O = U x W^(growth - 1) of the global batch: more
workers have more keys, but share many of them (keys.py). With exchange.replicas, M groups of W / M workers have all
rows each: a worker has M times the rows and the keys of one of W, and sums of its group's keys besides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nestpipe.data.inspect import OVERHEAD_BYTES
from nestpipe.embedding.table import Table
from nestpipe.sizing.keys import KeyGrowth
from nestpipe.sizing.trial import Trial

PLAN_BYTES = 48
"""Bytes of lists that exchanging a distinct key among several workers takes; measured (docs/log.md)."""
BATCHES_WITH_LISTS = 5
"""Batches under way that have lists, in schedules that overlap batches; 2 in others."""
SPARE = 9 / 8
"""Slots of the row pool that are allocated, relative to those that batches in flight need."""

HOST, DEVICE = "host", "device"


@dataclass(frozen=True)
class Part:
    """Memory of one kind."""

    name: str
    place: str
    """HOST or DEVICE."""
    num_bytes: float
    formula: str


@dataclass(frozen=True)
class TableSize:
    """A table, over all workers."""

    name: str
    num_rows: int
    dim: int
    state_width: int
    item_bytes: int
    origin: str = ""
    """Where the number of rows comes from."""

    @staticmethod
    def of(table: Table, num_rows: int, origin: str) -> "TableSize":
        width = table.spec(0).state_width
        return TableSize(table.name, num_rows, table.dim, width, table.dtype.itemsize, origin)

    @property
    def row_bytes(self) -> int:
        return self.dim * self.item_bytes

    @property
    def record_bytes(self) -> int:
        return (self.dim + self.state_width) * self.item_bytes


@dataclass(frozen=True)
class Case:
    """A recipe on some workers."""

    trial: Trial
    keys: KeyGrowth
    tables: tuple[TableSize, ...]
    num_workers: int
    resident_bytes: int | None = None
    """memory.resident_bytes, if it is a number."""
    device_budget_bytes: int | None = None
    batch_scale: float = 1.0
    """Size of a batch, relative to the recipe's."""
    replicas: int = 1
    """exchange.replicas."""

    @property
    def num_shards(self) -> int:
        """Returns the workers among which rows are sharded."""
        return self.num_workers // self.replicas

    @property
    def num_keys(self) -> float:
        """Returns the distinct keys of a worker's batch."""
        return self.keys.of_batch * self.batch_scale

    @property
    def num_owned(self) -> float:
        """Returns the distinct keys of a global batch that a worker owns."""
        rows = sum(table.num_rows for table in self.tables) / self.num_shards
        return min(self.replicas * self.num_keys * self.keys.owned(self.num_workers), max(rows, 1.0))

    @property
    def row_bytes(self) -> float:
        """Returns the bytes of a row, the mean over the keys of a batch."""
        return self._mean([table.row_bytes for table in self.tables])

    @property
    def record_bytes(self) -> float:
        return self._mean([table.record_bytes for table in self.tables])

    def _mean(self, sizes: Sequence[int]) -> float:
        weights = [self.keys.by_table[table.name] for table in self.tables]
        return sum(w * size for w, size in zip(weights, sizes, strict=True)) / max(1, sum(weights))

    @property
    def least_pool_bytes(self) -> float:
        """Returns the memory of records in flight."""
        crosses = self.trial.crosses_batches and self.num_workers > 1
        others = (2 if crosses else 1) * (1 - self.keys.overlap) if self.trial.is_overlapping else 0
        return self.num_owned * (1 + others) * self.record_bytes

    @property
    def pool_bytes(self) -> float:
        if not self.trial.is_overlapping:
            return self.least_pool_bytes
        if self.resident_bytes is None:
            return SPARE * self.least_pool_bytes
        all_rows = sum(table.num_rows * table.record_bytes for table in self.tables) / self.num_shards
        return max(self.least_pool_bytes, min(self.resident_bytes, all_rows))

    @property
    def embedding_bytes(self) -> float:
        """Returns what memory.device_budget_bytes limits."""
        named = {"pool", "lists", "messages"}
        return sum(part.num_bytes for part in self.parts if part.name in named)

    @property
    def parts(self) -> list[Part]:
        """Returns the memory of a worker, by kind."""
        trial, place = self.trial, DEVICE if self.trial.is_on_device else HOST
        store = sum(table.num_rows * table.record_bytes for table in self.tables) / self.num_shards
        rows = sum(table.num_rows for table in self.tables) / self.num_shards
        sharded = "rows / workers" if self.replicas == 1 else f"{self.replicas} replicas x rows / workers"
        parts = [
            Part("program", HOST, trial.program_bytes, "the process before its first step, measured"),
            Part("store", HOST, store, f"{sharded} x (dim + state width) x bytes of a number"),
            Part("overhead", HOST, rows * OVERHEAD_BYTES, f"{sharded} x {OVERHEAD_BYTES}: key, index, step"),
            Part("dense", place, trial.dense_bytes, "dense parameters, gradients, optimizer state"),
            Part("pool", place, self.pool_bytes, self._pool_formula()),
            Part("lists", place, self._list_bytes(), "keys, positions, inputs and plans of the batches under way"),
            Part("messages", place, self._message_bytes(), "rows and gradients of a batch, and their messages"),
            Part("activations", place, trial.activation_bytes * self.batch_scale, "peak of a step less all of these"),
        ]
        if self.replicas > 1:
            formula = "keys of a group x row: the sums of all groups, twice in messages"
            parts.append(Part("replica sums", place, self._replica_sum_bytes(), formula))
        if trial.is_on_device:
            staging = trial.embeddings.staging * self.batch_scale
            parts.append(Part("staging", HOST, staging, "pinned memory of records on their way"))
        return parts

    def total(self, place: str) -> float:
        return sum(part.num_bytes for part in self.parts if part.place == place)

    def with_rows(self, name: str, num_rows: int) -> "Case":
        """Returns the case with another number of rows of a table."""
        return replace(self, tables=tuple(replace(t, num_rows=num_rows) if t.name == name else t for t in self.tables))

    def _pool_formula(self) -> str:
        if not self.trial.is_overlapping:
            return "owned keys of a batch x record"
        if self.resident_bytes is not None:
            return "memory.resident_bytes, at most all rows of a worker"
        return "distinct owned keys of the batches in flight x record, and an eighth"

    def _list_bytes(self) -> float:
        one = (self.trial.embeddings.lists + self.trial.embeddings.stretches) * self.batch_scale
        if self.num_workers == 1:
            return one
        num = BATCHES_WITH_LISTS if self.trial.is_overlapping else 2
        return one + num * PLAN_BYTES * self.num_keys

    def _message_bytes(self) -> float:
        """Returns rows and gradients at the moment at which most are held: docs/memory.md."""
        trial, keys = self.trial, self.num_keys
        if self.num_workers == 1:
            one = trial.embeddings.rows + trial.embeddings.gradients + trial.embeddings.kept_rows
            return one * self.batch_scale * self.row_bytes / max(1.0, self._tried_row_bytes)
        num = trial.num_micro_batches
        held, widest = sum(trial.micro_batch_keys) * self.batch_scale, max(trial.micro_batch_keys) * self.batch_scale
        kept = keys if num > 1 else 0  # rows of the requester, and as many sums of their gradients
        ahead = held if trial.is_windowed else widest
        across = keys if trial.crosses_batches else 0  # early rows of the next batch
        sent = 2 * keys / num * (self.num_shards - 1) / self.num_shards
        return (2 * kept + ahead + across + widest + keys + sent) * self.row_bytes

    def _replica_sum_bytes(self) -> float:
        """Returns the sums of this worker's group, sent and received ones, those of all groups, and their totals."""
        own = self.num_keys * self.keys.owned(self.num_shards)
        return ((1 + 2 * (self.replicas - 1) + self.replicas) * own + self.num_owned) * self.row_bytes

    @property
    def _tried_row_bytes(self) -> float:
        """Returns the bytes of a row in the trial, in which all tables have the dim of the recipe."""
        return self.trial.config.model.dim * 4.0
