"""What all Parquet files that are written here have in common: their encoding, and streams of batches to fill them."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PAGE_BYTES = 1 << 20


def parquet_file(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Pages with checksums: whoever reads them with verification is told of a flipped bit."""
    options = {"compression": "zstd", "compression_level": 1, "data_page_size": PAGE_BYTES}
    return pq.ParquetWriter(path, schema, write_page_checksum=True, **options)


def write_group(file: pq.ParquetWriter, group: pa.Table) -> None:
    """One row group. In one piece, for pages may end where pieces do, and the sizes of batches are the engine's."""
    file.write_table(group.combine_chunks(), max(1, len(group)))


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
