"""Row optimizers, for `Table(optimizer=...)`. A row optimizer of your own derives from RowOptimizer."""

from nestpipe.embedding.optim import SGD, Adagrad, Adam, LearningRate, RowOptimizer, RowWiseAdagrad

__all__ = ["SGD", "Adagrad", "Adam", "LearningRate", "RowOptimizer", "RowWiseAdagrad"]


def __getattr__(name: str) -> object:
    if name == "RowwiseAdagrad":
        raise AttributeError("nestpipe.rows.RowwiseAdagrad is nestpipe.optim.RowWiseAdagrad since version 0.2")
    raise AttributeError(f"module 'nestpipe.optim' has no attribute {name!r}")
