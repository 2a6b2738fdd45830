"""Synchronous training of recommendation models whose embedding tables live in host memory."""

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.dataset import Batches
from nestpipe.distributed.world import World
from nestpipe.embedding import optim as rows
from nestpipe.embedding.features import Embeddings
from nestpipe.embedding.optim import RowOptimizer
from nestpipe.embedding.table import Pooled, Sequence, Table
from nestpipe.evaluation.evaluate import evaluate
from nestpipe.evaluation.ranking_metrics import RankMetrics
from nestpipe.evaluation.scorer import Scorer
from nestpipe.evaluation.validation import Validation
from nestpipe.pipelining.commit import NonFiniteError
from nestpipe.pipelining.options import PipelineOptions
from nestpipe.pipelining.pipeline import pipeline
from nestpipe.pipelining.step import Step
from nestpipe.store import init
from nestpipe.train.reducer import DenseReducer
from nestpipe.train.trainer import Trainer

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
