"""From samples to batches to micro-batches."""

from nestpipe.data.batch import Batch, Jagged, Weight
from nestpipe.data.parquet import ParquetData
from nestpipe.data.schema import Schema

__all__ = ["Batch", "Jagged", "ParquetData", "Schema", "Weight"]
