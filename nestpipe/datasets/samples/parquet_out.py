"""The Parquet files of prepared folders: their encoding, and streams of batches to fill them from."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PAGE_BYTES = 1 << 20


def parquet_file(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Opens a new file. Its pages have checksums, so that a reader which verifies them detects a flipped bit."""
    options = {"compression": "zstd", "compression_level": 1, "data_page_size": PAGE_BYTES}
    return pq.ParquetWriter(path, schema, write_page_checksum=True, **options)


def write_group(file: pq.ParquetWriter, group: pa.Table) -> None:
    """Writes one row group."""
    # In one chunk: a page may end where a chunk does, and the sizes of the chunks are the engine's choice.
    file.write_table(group.combine_chunks(), max(1, len(group)))


class BatchStream:
    """Record batches of any size, read again in pieces of other sizes."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def take(self, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Yields the next `num_rows` rows."""
        while num_rows > 0:
            batch = self._rest if self._rest is not None else next(self._batches)
            self._rest = batch.slice(num_rows) if len(batch) > num_rows else None
            yield batch.slice(0, num_rows)
            num_rows -= min(num_rows, len(batch))
