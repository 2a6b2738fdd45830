"""DuckDB, which parses, groups and sorts in a fixed amount of memory, and on disk beyond it."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nestpipe.store.cores import usable_cores

if TYPE_CHECKING:
    import pyarrow as pa

MEMORY_BYTES = 700_000_000
"""Memory of the engine; the whole process has a few hundred MB more."""
MOST_THREADS = 8
"""A limit, because each thread needs memory of its own."""
ROWS_A_BATCH = 1 << 17
_POLL_SECONDS = 0.1

Report = Callable[[float], None]
"""Takes the share that is done, 0 to 1."""


def num_threads() -> int:
    return min(MOST_THREADS, usable_cores())


class EngineError(Exception):
    """An error of the engine, in its own words."""


class Engine:
    def __init__(self, spill: Path) -> None:
        """spill: folder for what does not fit into memory."""
        try:
            import duckdb
        except ImportError:
            remedy = "install it with `pip install 'nestpipe[datasets]'`"
            raise ValueError(f"preparing data needs DuckDB; {remedy}") from None
        self._errors = duckdb.Error
        self._connection = duckdb.connect(
            config={
                "threads": num_threads(),
                "memory_limit": f"{MEMORY_BYTES}B",
                "temp_directory": str(spill),
                "preserve_insertion_order": True,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            }
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()

    def run(self, sql: str, report: Report = lambda done: None) -> None:
        """Runs a statement, which reports its progress and can be interrupted."""
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(self._connection.execute, sql)
            while True:
                try:
                    running.result(_POLL_SECONDS)
                    return
                except FutureTimeoutError:
                    report(min(1.0, max(0.0, self._connection.query_progress() / 100)))
                except self._errors as error:
                    raise EngineError(str(error)) from None
                except BaseException:
                    self._connection.interrupt()
                    raise

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        try:
            return list(self._connection.execute(sql).fetchall())
        except self._errors as error:
            raise EngineError(str(error)) from None

    def number(self, sql: str) -> int:
        return int(self.rows(sql)[0][0])

    def batches(self, sql: str) -> Iterator["pa.RecordBatch"]:
        """Yields a result in its order, without holding all of it in memory."""
        import pyarrow as pa  # slow to import

        try:
            yield from self._connection.sql(sql).to_arrow_reader(ROWS_A_BATCH)
        except (self._errors, pa.ArrowException) as error:
            raise EngineError(str(error)) from None
