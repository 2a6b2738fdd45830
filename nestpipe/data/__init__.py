"""Batches, and the data that they come from."""

from nestpipe.data.batch import Batch, Jagged, Weight
from nestpipe.data.dataset import Batches
from nestpipe.data.files.parquet import ParquetData
from nestpipe.data.files.schema import Schema

__all__ = ["Batch", "Batches", "Jagged", "ParquetData", "Schema", "Weight"]
