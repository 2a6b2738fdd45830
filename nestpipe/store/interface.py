"""The interface of a store: its tables, its bulk calls, and the checks that every implementation makes first.

A record is a row followed by its row state. Keys are int64 tensors, records [n, dim + state_width] tensors of the
table's dtype. All tensors are in host memory and contiguous; calls that allow gaps between rows say so.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from nestpipe.store.init import Constant, Distribution, Normal, TruncatedNormal, Uniform
from nestpipe.store.writer import Writer

if TYPE_CHECKING:
    from nestpipe.store.snapshot import KeepAside, Snapshot

NUM_BUCKETS = 65536
MOST_ROWS = 2**32 - 2
"""Most rows of one table on one rank."""
DTYPES = (torch.float32, torch.float64)


class TableFullError(RuntimeError):
    """A table would exceed its `max_rows`. Nothing was written."""


@dataclass(frozen=True)
class TableSpec:
    """One table of a store."""

    name: str
    dim: int
    state_width: int = 0
    initial_state: tuple[float, ...] = ()
    """One value for each column of the row state; empty if all are zero."""
    init: Distribution = field(default_factory=Constant)
    dtype: torch.dtype = torch.float32
    seed: int = 0
    max_rows: int | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        where = f"table {self.name!r}: "
        check_integer(f"{where}dim", self.dim, 1, 2**20)
        check_integer(f"{where}state_width", self.state_width, 0, 2**20)
        check_integer(f"{where}seed", self.seed, 0, 2**64 - 1)
        if self.max_rows is not None:
            check_integer(f"{where}max_rows", self.max_rows, 1, MOST_ROWS)
        if self.initial_state and len(self.initial_state) != self.state_width:
            raise ValueError(
                f"{where}{len(self.initial_state)} initial_state values for state_width {self.state_width}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"{where}dtype is {self.dtype}, must be torch.float32 or torch.float64")
        if not all(math.isfinite(value) for value in self.initial_state):
            raise ValueError(f"{where}initial_state has a value that is not finite")
        self._check_init(where)

    def _check_init(self, where: str) -> None:
        if not all(math.isfinite(value) for value in self.init.parameters):
            raise ValueError(f"{where}{self.init} has a parameter that is not finite")
        if isinstance(self.init, Uniform):
            width = self.init.high - self.init.low
            if width < 0 or not math.isfinite(width):
                raise ValueError(f"{where}{self.init} needs low <= high and a finite difference")
        if isinstance(self.init, Normal | TruncatedNormal) and self.init.std < 0:
            raise ValueError(f"{where}{self.init} needs std >= 0")

    @property
    def num_columns(self) -> int:
        return self.dim + self.state_width

    @property
    def record_bytes(self) -> int:
        return self.num_columns * self.dtype.itemsize

    @property
    def full_initial_state(self) -> tuple[float, ...]:
        return self.initial_state or (0.0,) * self.state_width


class Gathered(NamedTuple):
    records: Tensor
    """[n, dim + state_width], or [n, dim] with rows_only."""
    found: Tensor
    """[n] bool: True if the key was in the table; otherwise its record is the initial one."""
    steps: Tensor | None
    """[n] int64: step that last wrote the record, -1 if it was not found. None without with_steps."""


class Piece(NamedTuple):
    """Rows of a range of buckets, in ascending order of the keys' hashes."""

    keys: Tensor
    records: Tensor
    steps: Tensor


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one table in the store. Memory that was mapped but never written costs no physical memory."""

    num_rows: int
    record_bytes: int
    payload_bytes: int
    """Rows and row state."""
    metadata_bytes: int
    """Step numbers."""
    index_bytes: int
    """Index from key to record, including the keys."""
    erased_bytes: int
    """Erased records, kept for reuse."""
    mapped_bytes: int
    """Address space: an upper bound on physical memory."""


class RowStore(Protocol):
    """The part of a store that training uses. A call that raises has changed nothing."""

    @property
    def num_threads(self) -> int:
        """Threads that a bulk call may use."""

    @property
    def num_writes(self) -> int:
        """Number of calls so far that may have changed a row: scatter, scatter_tables, erase and import_piece, and
        those of writers. A call is counted before it writes. One that raises counts, too, unless it was refused because
        a writer is open. Equal numbers at two moments mean that no row changed in between."""

    def gather_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        out: Tensor,
        places: Tensor | None,
        found: Tensor | None = None,
    ) -> Tensor:
        """Gathers whole records of several tables at one moment. Table tables[t] has keys offsets[t] .. offsets[t + 1]
        - 1. Each table occurs once; all have records of the same width and dtype.

        Records go to rows `places` of `out`, which are distinct; None stands for all rows, in order. There may be gaps
        between rows of `out`. Returns `found`, written to the given tensor if there is one."""

    def scatter_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        records: Tensor,
        places: Tensor | None,
        step: int | Tensor,
    ) -> None:
        """Writes rows `places` of `records` to several tables, given as in gather_tables. `step`: one number for all
        keys, or [n] int64, the step of each key. If one table is full, none changes."""

    def find_tables(self, tables: Sequence[str], offsets: Tensor, keys: Tensor) -> Tensor:
        """Returns which keys exist, [n] bool. Tables are given as in gather_tables; their records may differ."""

    def sizes(self, tables: Sequence[str]) -> Tensor:
        """Returns the number of rows of each table, int64."""

    def open_writer(self) -> Writer:
        """Returns the only writer of the store. Until it is closed, scatter, scatter_tables, erase and import_piece
        raise."""


class Store(RowStore, Protocol):
    """The interface of HostStore and of its oracle, DictStore."""

    num_threads: int
    num_snapshots: int
    """Snapshots that were begun so far."""

    def create_table(self, spec: TableSpec) -> None: ...

    def spec(self, table: str) -> TableSpec: ...

    def size(self, table: str) -> int: ...

    def reserve(self, table: str, num_rows: int) -> None: ...

    def gather(
        self, table: str, keys: Tensor, *, out: Tensor | None = None, rows_only: bool = False, with_steps: bool = False
    ) -> Gathered:
        """Returns copies of records. Never inserts: a missing key gets its initial row and state, and `found` False."""

    def scatter(self, table: str, keys: Tensor, records: Tensor, step: int) -> None:
        """Writes records and inserts missing keys. If a key occurs twice, its last record stays."""

    def find(self, table: str, keys: Tensor) -> Tensor: ...

    def erase(self, table: str, keys: Tensor) -> int: ...

    def count(self, table: str, first_bucket: int, end_bucket: int) -> int: ...

    def export_piece(self, table: str, first_bucket: int, end_bucket: int) -> Piece: ...

    def import_piece(self, table: str, first_bucket: int, end_bucket: int, piece: Piece) -> None: ...

    def begin_snapshot(self, changed_only: bool, keep_aside: "KeepAside") -> "Snapshot":
        """Begins a snapshot of all tables, while nothing writes. At most one is under way.

        changed_only: only rows written since the snapshot before began; the first one must be complete. keep_aside:
        receives rows of the snapshot that a later write would replace."""

    def digest_part(self, table: str) -> int:
        """Returns the sum modulo 2^256 of SHA-256(key, row, row state). The parts of several ranks add up."""

    def memory(self, table: str) -> MemoryReport: ...


def check_integer(what: str, value: int, low: int, high: int) -> int:
    """Refuses floats, bools, and numbers that native code would silently truncate."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{what} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{what} is {value}, must be {low} .. {high}")
    return operator.index(value)


def check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a table's name must be a string, got {name!r}")
    if not name or "\0" in name:
        raise ValueError(f"a table's name must not be empty or contain a NUL character, got {name!r}")
    name.encode()  # raises for a lone surrogate


def check_threads(num_threads: int) -> int:
    return check_integer("num_threads", num_threads, 1, 1024)


def check_array(
    what: str, array: Tensor, dtype: torch.dtype, shape: Sequence[int | None], may_have_gaps: bool = False
) -> None:
    """Refuses arrays that native code cannot read. None in `shape` stands for any size; may_have_gaps: between rows."""
    if not isinstance(array, Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(array).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"{what} must be {dtype}, got {array.dtype}; convert with .to({dtype})")
    if not array.is_cpu:
        raise ValueError(f"{what} must be in host memory, got a tensor on {array.device}; copy it with .cpu()")
    fits = array.dim() == len(shape) and all(w in (None, s) for w, s in zip(shape, array.shape, strict=True))
    if not fits:
        wanted = "[" + ", ".join("n" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{what} must have shape {wanted}, got {list(array.shape)}")
    is_dense = array.layout == torch.strided and not array.is_neg()
    if not is_dense or not (array.is_contiguous() or (may_have_gaps and _has_whole_rows(array))):
        raise ValueError(f"{what} must be contiguous and dense; call .resolve_neg().contiguous()")
    if array.data_ptr() % array.element_size() != 0:
        raise ValueError(f"{what} must be aligned in memory to its elements; call .clone()")


def _has_whole_rows(array: Tensor) -> bool:
    """Returns whether rows are contiguous and do not overlap."""
    (num_rows, width), (row_stride, column_stride) = array.shape, array.stride()
    return (width <= 1 or column_stride == 1) and (num_rows <= 1 or row_stride >= width)


def check_keys(keys: Tensor) -> int:
    """Returns the number of keys."""
    check_array("keys", keys, torch.int64, [None])
    return keys.numel()


def check_offsets(what: str, offsets: Tensor, num_tables: int) -> None:
    """Checks the shape. Native code checks that offsets ascend from 0 to the number of keys."""
    check_array(what, offsets, torch.int64, [num_tables + 1])


def check_some_tables(tables: Sequence[str]) -> None:
    """Refuses an empty sequence, and a string, whose letters would be taken for names."""
    if isinstance(tables, str) or len(tables) == 0:
        raise ValueError(f"tables must be a sequence of at least one name, got {tables!r}")


def check_buckets(first_bucket: int, end_bucket: int) -> None:
    check_integer("first_bucket", first_bucket, 0, NUM_BUCKETS)
    check_integer("end_bucket", end_bucket, 0, NUM_BUCKETS)
    if not 0 <= first_bucket <= end_bucket <= NUM_BUCKETS:
        raise ValueError(f"buckets [{first_bucket}, {end_bucket}) are not a range within 0 .. {NUM_BUCKETS}")


def check_step(step: int) -> None:
    check_integer("step", step, 0, 2**63 - 1)


def check_steps(step: int | Tensor, num_keys: int) -> None:
    """Checks one step for all keys, or the array of their steps. Native code checks that those are not negative."""
    if isinstance(step, Tensor):
        check_array("step", step, torch.int64, [num_keys])
    else:
        check_step(step)


def check_reserve(spec: TableSpec, num_rows: int) -> None:
    check_integer(f"reserve in table {spec.name!r}: num_rows", num_rows, 0, spec.max_rows or MOST_ROWS)


def check_piece(spec: TableSpec, piece: Piece) -> int:
    """Returns the number of rows."""
    num_rows = check_keys(piece.keys)
    check_array("records", piece.records, spec.dtype, [num_rows, spec.num_columns])
    check_array("steps", piece.steps, torch.int64, [num_rows])
    return num_rows


def check_out(spec: TableSpec, out: Tensor | None, num_keys: int, rows_only: bool) -> Tensor:
    """Returns the output of a gather: the caller's, or a new one."""
    shape = [num_keys, spec.dim if rows_only else spec.num_columns]
    if out is None:
        return torch.empty(shape, dtype=spec.dtype)
    check_array("out", out, spec.dtype, shape)
    if out.requires_grad:
        raise ValueError("out must not require a gradient: it is overwritten; pass out.detach()")
    return out


def check_records_at(spec: TableSpec, records: Tensor, what: str, places: Tensor | None, num_keys: int) -> int:
    """Checks an array of whole records; native code checks that it has rows `places`. Returns the distance between
    rows, in elements."""
    shape = [num_keys if places is None else None, spec.num_columns]
    check_array(what, records, spec.dtype, shape, may_have_gaps=True)
    if records.requires_grad:
        raise ValueError(f"{what} must not require a gradient; pass {what}.detach()")
    if places is not None:
        check_array("places", places, torch.int64, [num_keys])
    return records.stride(0) if len(records) > 1 else spec.num_columns


def check_found(found: Tensor | None, num_keys: int) -> Tensor:
    """Returns the flags of a gather: the caller's tensor, or a new one."""
    if found is None:
        return torch.empty(num_keys, dtype=torch.bool)
    check_array("found", found, torch.bool, [num_keys])
    return found
