"""What all Parquet files that are written here have in common: their encoding, and streams of batches to fill them."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

WHOLE_TABLE = 2**31
"""rows of a row group: as many as are written at once"""


def parquet_file(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, schema, compression="zstd", compression_level=1)


class BatchStream:
    """Record batches of any size, taken in pieces of any other."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._left: pa.RecordBatch | None = None

    def take(self, num_rows: int) -> Iterator[pa.RecordBatch]:
        """The next ones, num_rows in all."""
        while num_rows > 0:
            batch = self._left if self._left is not None else next(self._batches)
            self._left = batch.slice(num_rows) if len(batch) > num_rows else None
            yield batch.slice(0, num_rows)
            num_rows -= min(num_rows, len(batch))
