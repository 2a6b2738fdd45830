"""Sampled softmax on a device, with negatives of each sample: what nestpipe/ops/sampled_softmax.py defines.

It works on rows at their occurrences. Products of matrices are torch's, a block of tokens with the negatives of its
sample at a time; kernels do the rest. Gradients are made on the way, one buffer for all, and backward scales them.
Nothing is sorted and nothing added by atomics; but for the products of matrices, whose form torch chooses by their
shapes, a token's bits are the same whatever else is in the launch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.attention.tiles import Tiles

SMALLEST_NORM = 1e-6
GATHERED_ELEMENTS = 2**26
"""elements of negatives, a set for each block of tokens, worked on at a time"""
OUTPUT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Work:
    values: tuple[Tensor, ...]
    """outputs, and the rows at the occurrences of history, target and negatives; [n, dim] each"""
    index: tuple[Tensor, ...]
    """[n] which rows they are, of history, target and negatives"""
    tiles: Tiles
    scale: float
    """of logits: 1 / temperature"""
    num_negatives: int
    """of a sample"""
    dim: int
    num_slots: int
    per_token: Tensor
    """[4, num_slots], see triton_sampled_softmax.py"""
    gradients: Tensor | None
    """of all values, one below another; None: nothing is trained"""


def sampled_softmax_kernel(
    values: tuple[Tensor, Tensor, Tensor, Tensor],
    index: tuple[Tensor, Tensor, Tensor],
    tiles: Tiles,
    temperature: float,
) -> Tensor:
    """The sum over tokens. values: outputs, float32 or bfloat16, and in float32 the rows at the occurrences of history,
    target and negatives; index: which rows they are. As many negatives for each sample, and those as `tiles` has them.
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
    """Of some units. bmm with `out` is not subject to autocast."""
    from nestpipe.kernels.softmax.triton_sampled_softmax import gradients, place, softmax

    new = work.per_token.new_empty
    x = new(num_units, work.tiles.size, work.dim)
    negatives = new(num_units, work.num_negatives, work.dim)
    place(work, first_unit, num_units, x, negatives)
    slopes = new(num_units, work.tiles.size, work.num_negatives)
    torch.bmm(x, negatives.transpose(1, 2), out=slopes)
    softmax(work, first_unit, num_units, slopes)
    if work.gradients is not None:
        d_x = torch.bmm(slopes, negatives, out=torch.empty_like(x))
        torch.bmm(slopes.transpose(1, 2), x, out=negatives)
        gradients(work, first_unit, num_units, x, d_x, negatives)
