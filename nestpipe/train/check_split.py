"""Checks that a model can be trained in micro-batches: its loss sums must not depend on how a batch is cut."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import BatchSource
from nestpipe.distributed import World
from nestpipe.embedding.cluster import GIVEN_ORDER, Clustering
from nestpipe.embedding.read import read_batch
from nestpipe.embedding.table import Feature
from nestpipe.kernels.flops import counting
from nestpipe.store import Store
from nestpipe.train.fixed_noise import FixedNoise, fixed_noise, seed_alike
from nestpipe.train.loss import loss_sums

MAX_SMALL_BATCHES = 16
"""Leading batches of fewer than two samples after which the check gives up."""

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}

MIXES = (
    "the loss of a batch depends on how the batch is cut. Likely: {causes}. In one micro-batch it is trained as it is: "
    "each rank sees the samples of its own batch only, and buffers such as running statistics stay each rank's own, so "
    "results depend on the batch size per rank and on the number of ranks. In several micro-batches it is refused"
)
"""Warning for one micro-batch. It has no figures, so that Python shows it once for several calls of fit."""


class SplitError(ValueError):
    """The loss of a model depends on how a batch is cut."""


class SplitCheck:
    """Compares the loss sums of a batch and of its parts: its halves, and the micro-batches it would be trained in.

    A model that mixes samples is refused if it would be trained in several micro-batches. With one, a batch is never
    cut, so the model trains as it would in plain torch, after a warning. A mean instead of a sum is refused always: its
    gradient would be divided by the number of samples twice.
    """

    def __init__(
        self,
        model: nn.Module,
        features: Mapping[str, Feature],
        store: Store,
        num_micro_batches: int = 1,
        clustering: Clustering = GIVEN_ORDER,
        warns: bool = True,
    ) -> None:
        """warns: whether this rank shows the warning."""
        self._model = model
        self._features = features
        self._store = store
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._is_cut = num_micro_batches > 1
        self._warns = warns
        self._splits = {"in two": (2, GIVEN_ORDER)}
        if num_micro_batches > 1:
            name = f"into {num_micro_batches} micro-batches, cluster.method = {clustering.method!r}"
            self._splits[name] = (num_micro_batches, clustering)

    def first_batch(self, source: BatchSource, steps: int | None) -> float | None:
        """Checks the first batch with at least two samples, and gives all batches it pulled back to the source.

        The check runs in the caller's thread, because another thread pulls batches while the model trains. An error
        takes the place of its batch and is raised when that batch is pulled, so that all ranks learn of it.

        Returns the floating-point operations of a forward on one of its samples; None if they are not known.
        """
        flops = None
        pulled: list[Batch | Exception] = []
        try:
            for batch in islice(source, steps):
                pulled.append(batch)
                if len(batch) >= 2:
                    try:
                        flops = self.check(batch)
                    except Exception as error:
                        pulled[-1] = error
                    break
                if len(pulled) == MAX_SMALL_BATCHES:
                    break
        except Exception as error:  # raised by the reader
            pulled.append(error)
        source.give_back(pulled)
        return flops

    def check(self, batch: Batch) -> float | None:
        """Compares the sums. The model, its buffers and the random generators stay as they are.

        Returns the floating-point operations of a forward on a sample, of which this is a good place to count them: no
        step is slower for it. None if the model does not run while it is counted.
        """
        with _undisturbed(self._model), torch.no_grad(), fixed_noise(self._device) as noise:
            try:
                with counting() as count:
                    whole = self._sums(batch, 1, GIVEN_ORDER, noise)
                flops = count.total / len(batch)
            except Exception:  # the model's own error comes again, without the count
                flops, whole = None, self._sums(batch, 1, GIVEN_ORDER, noise)
            parts = {name: self._sums(batch, *split, noise) for name, split in self._splits.items()}
        tolerance = max(TOLERANCE[feature.table.dtype] for feature in self._features.values())
        for loss, expected in whole.items():
            for split, sums in parts.items():
                close = abs(expected - sums[loss]) <= tolerance * max(abs(expected), abs(sums[loss]), 1e-6)
                if math.isfinite(expected) and not close:  # the step reports a loss that is not finite
                    self._object(loss, split, expected, sums[loss], noise)
        return flops

    def _object(self, loss: str, split: str, whole: float, parts: float, noise: FixedNoise) -> None:
        """Refuses the model, or warns if it will be trained in one micro-batch."""
        causes = _causes(self._model, noise)
        if self._is_cut or _is_mean(whole, parts):
            raise SplitError(_refusal(loss, split, whole, parts, causes, self._is_cut))
        if self._warns:
            warnings.warn(MIXES.format(causes="; or ".join(causes)), stacklevel=5)  # at the call of fit

    def _sums(self, batch: Batch, num_parts: int, clustering: Clustering, noise: FixedNoise) -> dict[str, float]:
        """Returns loss sums, on this rank alone: keys of other owners get initial rows, and any row will do."""
        alone = World().evaluate
        reading = read_batch(self._features, batch, self._store, alone, num_parts, clustering, self._device)
        assert reading is not None
        totals: dict[str, float] = {}
        for part in reading:
            seed_alike(self._device)
            with noise:
                losses = self._model(part.embeddings, part.inputs)
            for name, value in loss_sums(losses, batch.weights).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Sets training mode without dropout. Restores modes and buffers afterwards."""
    with restored(model):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        yield


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restores the modes and buffers of a model when the context ends. Parameters must not change."""
    modules = list(model.modules())
    were_training = [module.training for module in modules]
    buffers = [{name: (buffer, buffer.clone()) for name, buffer in _own_buffers(module)} for module in modules]
    try:
        yield
    finally:
        for module, was_training, saved in zip(modules, were_training, buffers, strict=True):
            module.training = was_training
            _restore(module, saved)


def _own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers(recurse=False))


def _restore(module: nn.Module, buffers: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Restores buffers that a forward changed or replaced, and deletes those that it made."""
    for name, _ in _own_buffers(module):
        if name not in buffers:
            delattr(module, name)
    for name, (buffer, values) in buffers.items():
        buffer.copy_(values)
        setattr(module, name, buffer)


def _causes(model: nn.Module, noise: FixedNoise) -> list[str]:
    norms = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)})
    causes = [
        f"{', '.join(norms)} mixes the samples of a batch" if norms else "",
        f"it draws random numbers ({', '.join(sorted(noise.drawn))})" if noise.drawn else "",
        "it uses the other samples of the batch (in-batch negatives, batch statistics, the batch's padded length)",
    ]
    return [cause for cause in causes if cause]


def _is_mean(whole: float, parts: float) -> bool:
    """Returns whether the parts of a batch cut in two add up to twice its loss, as means do."""
    return abs(parts - 2 * whole) < 0.2 * abs(whole)


def _refusal(name: str, split: str, whole: float, parts: float, causes: list[str], is_cut: bool) -> str:
    subject = f"the loss {name!r}" if name else "the loss"
    likely = [*(["the model returns a mean instead of a sum"] if _is_mean(whole, parts) else []), *causes]
    consequence = (
        "this model cannot be trained in micro-batches"
        if is_cut
        else "fit divides a loss by the batch's weight, so the gradient of a mean would be too small"
    )
    return (
        f"{subject} of a batch is {whole:.6g}, but {parts:.6g} when the batch is cut {split}: {consequence}. "
        f"Likely: {'; or '.join(likely)}. "
        "Make the loss a sum over samples, each computed alone, or switch the check off with check_split=False"
    )
