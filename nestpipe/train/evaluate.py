"""Evaluation: the loss and metrics of a model as it is, at a step boundary, without a trace in its tables."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.distributed import Channel
from nestpipe.train.loss import loss_sums
from nestpipe.train.read import read_batch

if TYPE_CHECKING:
    from nestpipe.train.trainer import Trainer


class Metric(Protocol):
    """Sees what the model's `predict` returned for each batch of this rank; computes one or more numbers over all."""

    def update(self, predictions: Tensor, inputs: Mapping[str, Tensor]) -> None: ...

    def compute(self, channel: Channel) -> dict[str, float]: ...


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """the loss sums over all samples of all ranks, each divided by its weight, added up"""
    num_samples: int
    num_untrained_keys: int
    """distinct keys of each global batch that no step has trained: the model saw their initial rows"""
    metrics: dict[str, float]


def evaluate(trainer: "Trainer", batches: Iterable[Batch], metrics: Iterable[Metric] = ()) -> Evaluation:
    """All ranks call it, between steps, each with its own batches; all get the same result."""
    metrics = list(metrics)
    model, channel = trainer.model, trainer.world.evaluate
    if metrics and not hasattr(model, "predict"):
        raise ValueError(f"{type(model).__name__} has no method predict(embeddings, inputs), which metrics need")
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    counts = torch.zeros(2, dtype=torch.int64)
    iterator = iter(batches)
    with channel.watch.reporting(), _reading_mode(model):
        while (reading := read_batch(trainer.features, _next(iterator), trainer.store, channel)) is not None:
            for name, weight in reading.weights.items():
                weights[name] = weights.get(name, 0.0) + weight
            counts[1] += reading.num_untrained_keys
            for part in reading:
                counts[0] += part.num_samples
                for name, value in loss_sums(model(part.embeddings, part.inputs), reading.weights).items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                for metric in metrics:
                    metric.update(model.predict(part.embeddings, part.inputs), part.inputs)  # type: ignore[operator]
        totals = torch.tensor([sums.get(name, 0.0) for name in sorted(weights)], dtype=torch.float64)
        channel.all_reduce_sum(totals)
        channel.all_reduce_sum(counts)
        computed = {name: value for metric in metrics for name, value in metric.compute(channel).items()}
    divided = [float(t) / weights[name] for name, t in zip(sorted(weights), totals, strict=True) if weights[name] > 0]
    return Evaluation(sum(divided), int(counts[0]), int(counts[1]), computed)


def _next(iterator: Iterator[Batch]) -> Batch | Exception | None:
    try:
        return next(iterator, None)
    except Exception as error:  # told to every rank by the route
        return error


@contextmanager
def _reading_mode(model: nn.Module) -> Iterator[None]:
    """No gradients; dropout and the like as for a prediction; each module as before afterwards."""
    were_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in were_training.items():
            module.training = was_training
