"""Clips gradients by their joint norm."""

from torch import Tensor

from nestpipe.device.numerics import squared_norm
from nestpipe.pipelining.step import Step
from nestpipe.train.reducer import DenseReducer


def clip_gradients(step: Step, reducer: DenseReducer, clip_norm: float | None, with_rows: bool) -> float | Tensor:
    """Scales the reduced dense gradients down to clip_norm and returns the factor. with_rows: the norm includes the
    gradients of rows."""
    if clip_norm is None:
        return 1.0
    # Row gradients differ by rank, so their norm is summed; dense gradients are already the same on all ranks.
    squared = squared_norm((), reducer.world.device)
    if with_rows:
        squared = step.squared_gradient_norm()
        with step.trace.span("reduce"):
            reducer.world.dense.all_reduce_sum(squared)
    gradients = [p.grad for p in reducer.parameters if p.grad is not None]
    norm = (squared + squared_norm(gradients, reducer.world.device)).sqrt()
    scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return scale
