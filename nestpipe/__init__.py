"""Synchronous training of recommendation models whose embedding tables live in host memory."""

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Batches
from nestpipe.distributed.world import World
from nestpipe.embedding import row_optimizer as rows
from nestpipe.embedding.features import Embeddings
from nestpipe.embedding.row_optimizer import RowOptimizer
from nestpipe.embedding.table import Pooled, Sequence, Table
from nestpipe.pipelining.finite import NonFiniteError
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.pipeline import pipeline
from nestpipe.pipelining.step import Step
from nestpipe.store import init
from nestpipe.train.evaluate import evaluate
from nestpipe.train.rank_metrics import RankMetrics
from nestpipe.train.reducer import DenseReducer
from nestpipe.train.scorer import Scorer
from nestpipe.train.trainer import Trainer
from nestpipe.train.validation import Validation

__all__ = [
    "Batch",
    "Batches",
    "DenseReducer",
    "Embeddings",
    "Jagged",
    "NonFiniteError",
    "PipelineOptions",
    "Pooled",
    "RankMetrics",
    "RowOptimizer",
    "Scorer",
    "Sequence",
    "Step",
    "Table",
    "Trainer",
    "Validation",
    "World",
    "__version__",
    "evaluate",
    "init",
    "pipeline",
    "rows",
]

__version__ = "0.1.0"
