"""Write access to a store: open to all callers, or held by the one pipeline that is open on the store."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from nestpipe.store.native.library import NativeOptimizer

ScatterTables = Callable[[Sequence[str], Tensor, Tensor, Tensor, Tensor | None, int | Tensor], None]
UpdateTables = Callable[[Sequence[str], Tensor, Tensor, "NativeOptimizer", Tensor, int], None]


class Writer:
    """Writes the rows of an open pipeline to its store. Until it is closed, every other write raises."""

    def __init__(
        self, access: "WriteAccess", scatter_tables: ScatterTables, update_tables: UpdateTables | None = None
    ) -> None:
        """update_tables: None if the store cannot update records where they are."""
        self._access = access
        self._scatter_tables = scatter_tables
        self._update_tables = update_tables

    def scatter_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        records: Tensor,
        places: Tensor | None,
        step: int | Tensor,
    ) -> None:
        """Writes rows as Store.scatter_tables does."""
        self._access.count_write()
        self._scatter_tables(tables, offsets, keys, records, places, step)

    @property
    def can_update(self) -> bool:
        """Returns whether update_tables may be called."""
        return self._update_tables is not None

    def update_tables(
        self,
        tables: Sequence[str],
        offsets: Tensor,
        keys: Tensor,
        optimizer: "NativeOptimizer",
        gradient: Tensor,
        step: int,
    ) -> None:
        """Applies a row optimizer to the stored records of distinct keys, missing ones included, which are inserted.
        Tables are given as in Store.gather_tables. gradient: [n, dim]. If one table is full, none changes."""
        assert self._update_tables is not None
        self._access.count_write()
        self._update_tables(tables, offsets, keys, optimizer, gradient, step)

    def close(self) -> None:
        """Lets others write again. Closing twice does nothing."""
        self._access.close(self)


class WriteAccess:
    """The writer that a store has open, if any, and the number of writes.

    An open pipeline holds rows that are newer than those of the store, and rows that it read ahead of their use. A
    write that bypasses it would be overwritten or ignored, depending on the schedule, so it is refused.
    """

    def __init__(self) -> None:
        self.num_writes = 0
        self._writer: Writer | None = None
        self._lock = Lock()

    def open(self, scatter_tables: ScatterTables, update_tables: UpdateTables | None = None) -> Writer:
        with self._lock:
            if self._writer is not None:
                raise RuntimeError(
                    "another fit or pipeline is open on this store, and rows of both would overwrite each other; let "
                    "it end first, then begin the next one"
                )
            self._writer = Writer(self, scatter_tables, update_tables)
            return self._writer

    def close(self, writer: Writer) -> None:
        with self._lock:
            if self._writer is writer:
                self._writer = None

    def begin_write(self, method: str) -> None:
        """Counts a write. Refuses it while a pipeline is open."""
        with self._lock:
            if self._writer is not None:
                raise RuntimeError(
                    f"{method} was called on a store whose rows are being trained: rows in flight would hide or "
                    "overwrite what it writes. Call it between two calls of fit, or outside of the pipeline's `with` "
                    "block"
                )
            self.num_writes += 1

    def count_write(self) -> None:
        """Counts a write of the open writer."""
        with self._lock:
            self.num_writes += 1
