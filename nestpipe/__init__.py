"""Strictly synchronous training of recommendation models whose embedding tables live in host memory."""

from nestpipe import init, optim
from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed.world import World
from nestpipe.embedding.table import Pooled, Sequence, Table
from nestpipe.evaluation.evaluate import evaluate
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.pipeline import pipeline
from nestpipe.train.reducer import DenseReducer
from nestpipe.train.trainer import Trainer

__all__ = [
    "Batch",
    "DenseReducer",
    "Jagged",
    "PipelineOptions",
    "Pooled",
    "Sequence",
    "Table",
    "Trainer",
    "World",
    "__version__",
    "evaluate",
    "init",
    "optim",
    "pipeline",
]

__version__ = "0.2.0"

_MOVED = {
    "Batches": "nestpipe.data.Batches",
    "Embeddings": "nestpipe.embedding.Embeddings",
    "NonFiniteError": "nestpipe.pipelining.NonFiniteError",
    "RankMetrics": "nestpipe.evaluation.RankMetrics",
    "RowOptimizer": "nestpipe.optim.RowOptimizer",
    "Scorer": "nestpipe.evaluation.Scorer",
    "Step": "nestpipe.pipelining.Step",
    "Validation": "nestpipe.evaluation.Validation",
    "rows": "nestpipe.optim",
}
"""names of version 0.1"""


def __getattr__(name: str) -> object:
    if name in _MOVED:
        raise AttributeError(f"nestpipe.{name} is {_MOVED[name]} since version 0.2")
    raise AttributeError(f"module 'nestpipe' has no attribute {name!r}")
