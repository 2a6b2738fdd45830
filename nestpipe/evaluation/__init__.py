"""Evaluates a trained model: losses, metrics of clicks, ranks in a corpus, scores."""

from nestpipe.evaluation.clicks import ClickMetrics
from nestpipe.evaluation.evaluate import Evaluation, Metric
from nestpipe.evaluation.ranking_metrics import RankMetrics
from nestpipe.evaluation.scorer import Scorer
from nestpipe.evaluation.validation import Validation

__all__ = ["ClickMetrics", "Evaluation", "Metric", "RankMetrics", "Scorer", "Validation"]
