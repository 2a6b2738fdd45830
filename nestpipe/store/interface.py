"""What a store is: its tables, its bulk calls, and the checks that every implementation makes first.

A record is a row followed by its row state. Keys are int64 tensors, records [n, dim + state_width] tensors of the
table's dtype; all are contiguous and in host memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nestpipe.store.init import Constant, Distribution, Normal, TruncatedNormal, Uniform

NUM_BUCKETS = 65536
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
    """One value for each column of the row state; empty: all zero."""
    init: Distribution = field(default_factory=Constant)
    dtype: torch.dtype = torch.float32
    seed: int = 0
    max_rows: int | None = None

    def __post_init__(self) -> None:
        where = f"table {self.name!r}: "
        if not self.name or "\0" in self.name:
            raise ValueError(f"a table's name must not be empty or contain a NUL character, got {self.name!r}")
        if not 1 <= self.dim <= 2**20:
            raise ValueError(f"{where}dim is {self.dim}, must be 1 .. 2^20")
        if not 0 <= self.state_width <= 2**20:
            raise ValueError(f"{where}state_width is {self.state_width}, must be 0 .. 2^20")
        if self.initial_state and len(self.initial_state) != self.state_width:
            raise ValueError(
                f"{where}{len(self.initial_state)} initial_state values for state_width {self.state_width}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"{where}dtype is {self.dtype}, must be torch.float32 or torch.float64")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"{where}seed is {self.seed}, must be 0 .. 2^64 - 1")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"{where}max_rows is {self.max_rows}, must be at least 1, or None for no limit")
        self._check_init(where)

    def _check_init(self, where: str) -> None:
        if not all(math.isfinite(value) for value in self.init.parameters):
            raise ValueError(f"{where}{self.init} has a parameter that is not finite")
        if isinstance(self.init, Uniform) and self.init.low > self.init.high:
            raise ValueError(f"{where}{self.init} needs low <= high")
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
    """[n, dim + state_width], or [n, dim] when only rows were asked for."""
    found: Tensor
    """[n] bool: whether the key was in the table; where not, the record is its initial one."""
    steps: Tensor | None
    """[n] int64: step that last wrote the record, -1 where not found; None unless asked for."""


class Piece(NamedTuple):
    """Rows of a range of buckets, in ascending order of the keys' hashes."""

    keys: Tensor
    records: Tensor
    steps: Tensor


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one table in the store. What was mapped but never written costs no physical memory."""

    num_rows: int
    record_bytes: int
    payload_bytes: int
    """Rows and row state."""
    metadata_bytes: int
    """Step numbers."""
    index_bytes: int
    """Key to record, the keys themselves included."""
    erased_bytes: int
    """Records that were erased and wait to be used again."""
    mapped_bytes: int
    """Address space: an upper bound of the physical memory."""


class Store(Protocol):
    """The interface of the native store and of its oracle. Any call that raises has changed nothing."""

    def create_table(self, spec: TableSpec) -> None: ...

    def spec(self, table: str) -> TableSpec: ...

    def size(self, table: str) -> int: ...

    def reserve(self, table: str, num_rows: int) -> None: ...

    def gather(
        self, table: str, keys: Tensor, *, out: Tensor | None = None, rows_only: bool = False, with_steps: bool = False
    ) -> Gathered:
        """Copies records. Never inserts: a missing key gets its initial row and state, and `found` False."""

    def scatter(self, table: str, keys: Tensor, records: Tensor, step: int) -> None:
        """Writes records, inserting missing keys. Of a key that occurs twice the last record stays."""

    def find(self, table: str, keys: Tensor) -> Tensor: ...

    def erase(self, table: str, keys: Tensor) -> int: ...

    def count(self, table: str, first_bucket: int, end_bucket: int) -> int: ...

    def export_piece(self, table: str, first_bucket: int, end_bucket: int) -> Piece: ...

    def import_piece(self, table: str, first_bucket: int, end_bucket: int, piece: Piece) -> None: ...

    def digest_part(self, table: str) -> int:
        """Sum modulo 2^256 of SHA-256(key, row, row state); parts of several ranks add up."""

    def memory(self, table: str) -> MemoryReport: ...


def check_array(what: str, array: Tensor, dtype: torch.dtype, shape: Sequence[int | None]) -> None:
    """Refuses what native code could not read. None in `shape` stands for any size."""
    if not isinstance(array, Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(array).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"{what} must be {dtype}, got {array.dtype}; convert with .to({dtype})")
    if array.device.type != "cpu":
        raise ValueError(f"{what} must be in host memory, got a tensor on {array.device}; copy it with .cpu()")
    wanted = "[" + ", ".join("n" if size is None else str(size) for size in shape) + "]"
    fits = array.dim() == len(shape) and all(w in (None, s) for w, s in zip(shape, array.shape, strict=True))
    if not fits:
        raise ValueError(f"{what} must have shape {wanted}, got {list(array.shape)}")
    if not array.is_contiguous():
        raise ValueError(f"{what} must be contiguous; call .contiguous()")


def check_keys(keys: Tensor) -> int:
    """Returns how many there are."""
    check_array("keys", keys, torch.int64, [None])
    return keys.numel()


def check_buckets(first_bucket: int, end_bucket: int) -> None:
    if not 0 <= first_bucket <= end_bucket <= NUM_BUCKETS:
        raise ValueError(f"buckets [{first_bucket}, {end_bucket}) are not a range within 0 .. {NUM_BUCKETS}")


def check_step(step: int) -> None:
    if not 0 <= step < 2**63:
        raise ValueError(f"step is {step}, must be 0 .. 2^63 - 1")


def check_piece(spec: TableSpec, piece: Piece) -> int:
    """Returns how many rows it has."""
    num_rows = check_keys(piece.keys)
    check_array("records", piece.records, spec.dtype, [num_rows, spec.num_columns])
    check_array("steps", piece.steps, torch.int64, [num_rows])
    return num_rows


def check_out(spec: TableSpec, out: Tensor | None, num_keys: int, rows_only: bool) -> Tensor:
    """The output of a gather: the caller's, or a new one."""
    shape = [num_keys, spec.dim if rows_only else spec.num_columns]
    if out is None:
        return torch.empty(shape, dtype=spec.dtype)
    check_array("out", out, spec.dtype, shape)
    return out
