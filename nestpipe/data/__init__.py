"""From samples to batches to micro-batches."""

from nestpipe.data.batch import Batch, Jagged, Weight

__all__ = ["Batch", "Jagged", "Weight"]
