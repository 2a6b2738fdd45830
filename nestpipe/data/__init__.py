"""Samples and batches: the data that is trained on, from files or synthetic."""

from nestpipe.data.batch import Batch, Jagged, Weight
from nestpipe.data.files.parquet import ParquetData
from nestpipe.data.files.schema import Schema

__all__ = ["Batch", "Jagged", "ParquetData", "Schema", "Weight"]
