"""Sampled softmax on a device, for negatives of each sample; nestpipe/ops/sampled_softmax.py has the formula.

It works on rows at their occurrences. torch multiplies matrices, a block of tokens with the negatives of its sample at
a time, and kernels do the rest. Forward computes all gradients into one array, and backward scales them. Nothing is
sorted, and no atomic additions are used. Except for the products of matrices, whose algorithm torch chooses by shape, a
token's bits do not depend on what else is in the launch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.attention.tiles import Tiles

SMALLEST_NORM = 1e-6
GATHERED_ELEMENTS = 2**26
"""Elements of negatives, one set for each block of tokens, gathered at a time."""
OUTPUT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Work:
    """The arrays and sizes of one sampled softmax."""

    values: tuple[Tensor, ...]
    """Outputs, and the rows at the occurrences of history, target and negatives, [n, dim] each."""
    index: tuple[Tensor, ...]
    """Numbers of the rows of history, target and negatives, [n] each."""
    tiles: Tiles
    scale: float
    """Factor of logits, 1 / temperature."""
    num_negatives: int
    """Number of negatives of a sample."""
    dim: int
    num_slots: int
    per_token: Tensor
    """Values of each slot, [4, num_slots]; triton_sampled_softmax.py lists them."""
    gradients: Tensor | None
    """Gradients of all values, concatenated; None if nothing is trained."""


def sampled_softmax_kernel(
    values: tuple[Tensor, Tensor, Tensor, Tensor],
    index: tuple[Tensor, Tensor, Tensor],
    tiles: Tiles,
    temperature: float,
) -> Tensor:
    """Returns the loss, summed over tokens.

    values: outputs, float32 or bfloat16, and in float32 the rows at the occurrences of history, target and negatives.
    index: the numbers of these rows. Each sample of `tiles` has the same number of negatives.
    """
    outputs, *others = values
    if outputs.dtype not in OUTPUT_DTYPES or any(x.dtype != torch.float32 for x in others):
        raise ValueError(f"outputs are {outputs.dtype}, rows {[x.dtype for x in others]}; rows must be float32")
    if not len(outputs) == len(others[0]) == tiles.num_tokens:
        raise ValueError(f"there are {len(outputs)} outputs and {tiles.num_tokens} tokens, must be the same")
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in values)
    loss: Tensor = _SampledSoftmax.apply(*values, index, tiles, temperature, is_trained)  # type: ignore[no-untyped-call]
    return loss


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        history: Tensor,
        target: Tensor,
        negatives: Tensor,
        index: tuple[Tensor, ...],
        tiles: Tiles,
        temperature: float,
        is_trained: bool,
    ) -> Tensor:
        values = tuple(x.contiguous() for x in (outputs, history, target, negatives))
        counts = [len(x) for x in values]
        num_slots, dim = tiles.num_blocks * tiles.size, outputs.shape[1]
        gradients = history.new_zeros(sum(counts), dim) if is_trained else None
        per_token = history.new_empty(4, num_slots)
        num_negatives = len(negatives) // max(1, len(target))
        work = Work(values, index, tiles, 1 / temperature, num_negatives, dim, num_slots, per_token, gradients)
        at_a_time = max(1, GATHERED_ELEMENTS // max(1, num_negatives * max(dim, tiles.size)))
        for first_unit in range(0, tiles.num_blocks, at_a_time):
            _launch(work, first_unit, min(at_a_time, tiles.num_blocks - first_unit))
        if gradients is not None:
            ctx.save_for_backward(gradients)
            ctx.counts = counts
        return per_token[3].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return *(gradients * gradient).split(ctx.counts), None, None, None, None


def _launch(work: Work, first_unit: int, num_units: int) -> None:
    """Computes the losses and gradients of some units."""
    from nestpipe.kernels.softmax.triton_sampled_softmax import gradients, place, softmax

    new = work.per_token.new_empty
    x = new(num_units, work.tiles.size, work.dim)
    negatives = new(num_units, work.num_negatives, work.dim)
    place(work, first_unit, num_units, x, negatives)
    slopes = new(num_units, work.tiles.size, work.num_negatives)
    torch.bmm(x, negatives.transpose(1, 2), out=slopes)  # autocast does not apply to bmm with `out`
    softmax(work, first_unit, num_units, slopes)
    if work.gradients is not None:
        d_x = torch.bmm(slopes, negatives, out=torch.empty_like(x))
        torch.bmm(slopes.transpose(1, 2), x, out=negatives)
        gradients(work, first_unit, num_units, x, d_x, negatives)
