"""From samples to batches to micro-batches."""

from nestpipe.data.batch import Batch, Jagged, Weight
from nestpipe.data.files.parquet import ParquetData
from nestpipe.data.files.schema import Schema

__all__ = ["Batch", "Jagged", "ParquetData", "Schema", "Weight"]
