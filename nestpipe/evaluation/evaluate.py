"""Evaluates the loss and metrics of a model at a step boundary, without changing its tables."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed import Channel
from nestpipe.embedding.read import read_batch
from nestpipe.train.loss import loss_sums

if TYPE_CHECKING:
    from nestpipe.train.trainer import Trainer


class Metric(Protocol):
    """Collects the outputs of a model's method for this rank's batches, and computes numbers over all ranks."""

    @property
    def method(self) -> str:
        """Name of the model's method, called with (embeddings, inputs): "predict" or "encode", for example."""

    def update(self, outputs: Tensor, inputs: Mapping[str, Tensor], keys: Mapping[str, Jagged]) -> None:
        """Adds one batch. All tensors are in host memory."""

    def compute(self, channel: Channel) -> dict[str, float]:
        """Returns numbers by name. All ranks call it."""


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Loss sums over all samples of all ranks, each divided by its weight, added up."""
    num_samples: int
    num_untrained_keys: int
    """Distinct keys of each global batch that no step has trained; the model saw their initial rows."""
    metrics: dict[str, float]


def evaluate(trainer: "Trainer", batches: Iterable[Batch], metrics: Iterable[Metric] = ()) -> Evaluation:
    """Evaluates the model. All ranks call it between steps, each with its own batches, and get the same result."""
    trainer.flush()
    metrics = list(metrics)
    model, channel = trainer.model, trainer.world.evaluate
    methods = sorted({metric.method for metric in metrics})
    for method in methods:
        if not hasattr(model, method):
            raise ValueError(f"{type(model).__name__} has no method {method}(embeddings, inputs), which metrics need")
    totals: dict[str, tuple[float, float]] = {}
    counts = torch.zeros(2, dtype=torch.int64)
    iterator = iter(batches)
    with channel.watch.reporting(), _eval_mode(model):
        while True:
            with channel.watch.busy():
                batch = _next(iterator)
            reading = read_batch(trainer.features, batch, trainer.store, channel, device=trainer.world.device)
            if reading is None:
                break
            _add(totals, {name: (0.0, weight) for name, weight in reading.weights.items()})
            counts[1] += reading.num_untrained_keys
            for part in reading:  # one, if this rank has samples
                counts[0] += part.num_samples
                assert isinstance(batch, Batch)
                with channel.watch.busy():
                    with trainer.precision():
                        sums = loss_sums(model(part.embeddings, part.inputs), reading.weights)
                        outputs = {method: getattr(model, method)(part.embeddings, part.inputs) for method in methods}
                    for metric in metrics:
                        metric.update(outputs[metric.method].cpu(), batch.inputs, batch.keys)
                _add(totals, {name: (float(value), 0.0) for name, value in sums.items()})
        channel.all_reduce_sum(counts)
        totals_by_rank = [json.loads(text) for text in channel.share_text(json.dumps(totals))]
        computed = {name: value for metric in metrics for name, value in metric.compute(channel).items()}
    all_totals: dict[str, tuple[float, float]] = {}
    for rank_totals in totals_by_rank:
        _add(all_totals, rank_totals)
    loss = sum(loss_sum / weight for loss_sum, weight in all_totals.values() if weight > 0)
    return Evaluation(loss, int(counts[0]), int(counts[1]), computed)


def _add(totals: dict[str, tuple[float, float]], more: Mapping[str, tuple[float, float]]) -> None:
    """Adds loss sums and weights by name of the loss. A rank without data has no names."""
    for name, (loss_sum, weight) in more.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + loss_sum, before[1] + weight)


def _next(iterator: Iterator[Batch]) -> Batch | Exception | None:
    try:
        return next(iterator, None)
    except Exception as error:  # the route tells every rank
        return error


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Sets eval mode without gradients. Restores the mode of each module afterwards."""
    were_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in were_training.items():
            module.training = was_training
