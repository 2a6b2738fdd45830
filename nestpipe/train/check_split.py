"""Whether a model may be trained in micro-batches: its loss sums must not depend on how a batch is cut."""

import math
from collections.abc import Mapping
from itertools import islice

import torch
from torch import nn

from nestpipe.data.batch import Batch
from nestpipe.data.dataset import BatchSource
from nestpipe.distributed import World
from nestpipe.embedding.table import Feature
from nestpipe.store import HostStore
from nestpipe.train.loss import loss_sums
from nestpipe.train.read import read_batch

MOST_SMALL_BATCHES = 16
"""of fewer than two samples at the beginning, after which the check is given up"""

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def check_first_batch(
    source: BatchSource, steps: int | None, model: nn.Module, features: Mapping[str, Feature], store: HostStore
) -> None:
    """Checks the first batch with two samples or more; those that were pulled for it are given back.

    That is done here and now, in the caller's thread: the batches will be pulled by another, while the model trains.
    What goes wrong takes the place of the batch, and is raised when that is pulled: so all ranks hear of it.
    """
    pulled: list[Batch | Exception] = []
    try:
        for batch in islice(source, steps):
            pulled.append(batch)
            if len(batch) >= 2:
                try:
                    check_split(model, features, batch, store)
                except Exception as error:
                    pulled[-1] = error
                break
            if len(pulled) == MOST_SMALL_BATCHES:
                break
    except Exception as error:  # of the reader
        pulled.append(error)
    source.give_back(pulled)


def check_split(model: nn.Module, features: Mapping[str, Feature], batch: Batch, store: HostStore) -> None:
    """Compares the loss sums of a batch and of its halves; leaves the model, its buffers and the generators alone."""
    dropouts = [module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    were_training = [module.training for module in dropouts]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    generator = torch.get_rng_state()
    try:
        for module in dropouts:
            module.eval()
        with torch.no_grad():
            whole, halves = (_sums(model, features, batch, store, n) for n in (1, 2))
    finally:
        for module, was_training in zip(dropouts, were_training, strict=True):
            module.train(was_training)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        torch.set_rng_state(generator)
    tolerance = max(TOLERANCE[feature.table.dtype] for feature in features.values())
    for name, expected in whole.items():
        if not math.isfinite(expected):
            continue  # another fault, which the step itself names
        if not abs(expected - halves[name]) <= tolerance * max(abs(expected), abs(halves[name]), 1e-6):
            raise ValueError(_refusal(model, name, expected, halves[name]))


def _sums(
    model: nn.Module, features: Mapping[str, Feature], batch: Batch, store: HostStore, num_parts: int
) -> dict[str, float]:
    """On this rank alone: the store knows the initial row of every key, whoever owns it, and any row will do."""
    reading = read_batch(features, batch, store, World().evaluate, num_parts)
    assert reading is not None
    totals: dict[str, float] = {}
    for part in reading:
        for name, value in loss_sums(model(part.embeddings, part.inputs), batch.weights).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def _refusal(model: nn.Module, name: str, whole: float, halves: float) -> str:
    norms = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)})
    causes = [
        f"{', '.join(norms)} mixes the samples of a batch" if norms else "",
        "the model returns a mean instead of a sum" if abs(halves - 2 * whole) < 0.2 * abs(whole) else "",
        "it uses the other samples of the batch (in-batch negatives, batch statistics, the batch's padded length)",
    ]
    which = f"the loss {name!r}" if name else "the loss"
    return (
        f"{which} of a batch is {whole:.6g}, but {halves:.6g} when the batch is cut in two: this model cannot be "
        f"trained in micro-batches. Likely: {'; or '.join(cause for cause in causes if cause)}. "
        "Make the loss a sum over samples, each computed alone, or switch the check off with check_split=False"
    )
