"""Sampled softmax of each token's next item against negatives.

A token's logits are the cosines of its output with the row of its next item and with the rows of its negatives, divided
by the temperature. A negative that is the next item itself is left out.

Forms:
    plain     the reference; gathers [num_tokens, negatives, dim]
    blocked   gathers the rows of a few tokens at a time and computes the gradients in forward, so that gathered rows
              need not be kept. The loss is a sum, so backward only scales the gradients. Kernels do it on CUDA if
              Triton is installed, negatives belong to samples and rows are float32; torch does it elsewhere, over the
              distinct rows of a micro-batch
    kernel    the blocked form by kernels; an error where they cannot run
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.kernels.attention.tiles import SIZES
from nestpipe.kernels.dispatch import (
    adds_in_order,
    compiles_triton,
    elements_at_a_time,
    kernels_cannot_run,
    product_dtype,
    runs_triton,
    without_autocast,
)
from nestpipe.kernels.flops import counts_as
from nestpipe.kernels.rows.pinned import upload
from nestpipe.kernels.softmax.sampled_softmax import OUTPUT_DTYPES, SMALLEST_NORM, sampled_softmax_kernel
from nestpipe.ops.row_sequences import RowSequence, check_targets, next_items
from nestpipe.ops.sequences import BLOCK, Sequences

NEGATIVES_PER = ("position", "sample")
FORMS = ("blocked", "kernel", "plain")
GATHERED_ELEMENTS = 2**19
"""Elements of rows gathered at a time in host memory: few enough for a core's cache."""


def sampled_softmax(
    outputs: Tensor,
    history: RowSequence,
    target: RowSequence,
    negatives: RowSequence,
    sequences: Sequences,
    negatives_per: str = "position",
    temperature: float = 0.05,
    form: str = "blocked",
) -> Tensor:
    """Returns the sum over tokens of -log softmax of the next item's logit, computed in the rows' dtype.

    outputs is [num_tokens, dim]. history has the tokens, and target has the item after the last one of each sample.
    Negatives are listed by token or by sample (negatives_per), the same number for each. The features share their rows.
    """
    with counts_as(lambda: 2 * outputs.numel() * (1 + _num_negatives(negatives.index, sequences, negatives_per))):
        return _loss(outputs, history, target, negatives, sequences, negatives_per, temperature, form)


def _loss(
    outputs: Tensor,
    history: RowSequence,
    target: RowSequence,
    negatives: RowSequence,
    sequences: Sequences,
    negatives_per: str,
    temperature: float,
    form: str,
) -> Tensor:
    check_targets(target, sequences)
    negative_lists = _negative_lists(negatives.index, sequences, negatives_per)
    if _takes_kernels(outputs, history.table.dtype, negatives_per, form):
        values = outputs, history.values, target.values, negatives.values
        index = history.index, target.index, negatives.index
        return sampled_softmax_kernel(values, index, sequences.in_tiles(_tile_size(outputs)), temperature)
    rows, positives = history.rows, next_items(history, target, sequences)
    with without_autocast(rows):
        outputs, rows = unit(outputs.to(rows.dtype)), unit(rows)
        if form == "plain":
            return _plain(outputs, rows, positives, negative_lists, sequences, negatives_per, temperature)
        units, work = _units(outputs, positives, negative_lists, sequences, negatives_per)
        is_trained = torch.is_grad_enabled() and (units.requires_grad or rows.requires_grad)
        loss: Tensor = _Blocked.apply(units, rows, work, temperature, is_trained)  # type: ignore[no-untyped-call]
        return loss


def _takes_kernels(outputs: Tensor, row_dtype: torch.dtype, negatives_per: str, form: str) -> bool:
    if form not in FORMS:
        raise ValueError(f"form is {form!r}, must be one of {', '.join(map(repr, FORMS))}")
    can_take = negatives_per == "sample" and row_dtype == torch.float32 and outputs.dtype in OUTPUT_DTYPES
    if form != "kernel":
        return form == "blocked" and can_take and compiles_triton(outputs)
    if not can_take:
        raise ValueError(
            f"form 'kernel' takes negatives of each sample, rows of float32 and outputs of float32 or bfloat16, got "
            f"negatives of each {negatives_per}, {row_dtype} and {outputs.dtype}; use 'blocked'"
        )
    if not runs_triton(outputs):
        raise kernels_cannot_run("form 'kernel'")
    return True


def _tile_size(outputs: Tensor) -> int:
    """Returns the tile size of attention, so that both share the tiles."""
    return SIZES.get(product_dtype(outputs), BLOCK)


def unit(vectors: Tensor) -> Tensor:
    """Returns vectors divided by their lengths, from which scores are computed."""
    return F.normalize(vectors, dim=-1, eps=SMALLEST_NORM)


@dataclass(frozen=True)
class _Work:
    """Tokens in units. The tokens of a unit share their negatives."""

    positives: Tensor
    """Row of each token's next item, [units, tokens]."""
    is_token: Tensor
    """1 for a token and 0 for padding, [units, tokens]."""
    negatives: Tensor
    """Rows of the negatives in each list, [lists, negatives]."""
    lists: Tensor
    """List of each unit, [units]."""


def _units(
    outputs: Tensor, positives: Tensor, negatives: Tensor, sequences: Sequences, negatives_per: str
) -> tuple[Tensor, _Work]:
    """Returns outputs [units, tokens, dim], and the work on them."""
    is_token = torch.ones_like(positives)
    if negatives_per == "position":
        numbers = torch.arange(len(positives), device=positives.device)
        return outputs[:, None], _Work(positives[:, None], is_token[:, None], negatives, numbers)
    blocks = sequences.in_blocks(min(BLOCK, sequences.max_length))
    shape = (blocks.num_blocks, blocks.size)
    work = _Work(
        blocks.to_slots(positives).view(shape),
        blocks.to_slots(is_token).view(shape),
        negatives,
        upload(blocks.samples, positives.device),
    )
    return blocks.to_slots(outputs).view(*shape, outputs.shape[1]), work


def _negative_lists(negatives: Tensor, sequences: Sequences, negatives_per: str) -> Tensor:
    """Returns [num_tokens or num_samples, negatives]."""
    if negatives_per not in NEGATIVES_PER:
        raise ValueError(f"negatives_per is {negatives_per!r}, must be 'position' or 'sample'")
    count = sequences.num_tokens if negatives_per == "position" else len(sequences.lengths)
    if count == 0:
        return negatives.new_zeros(0, 1)
    if len(negatives) == 0 or len(negatives) % count != 0:
        raise ValueError(
            f"there are {len(negatives)} negatives for {count} {negatives_per}s; each must have the same number of them"
        )
    return negatives.view(count, -1)


def _num_negatives(negatives: Tensor, sequences: Sequences, negatives_per: str) -> int:
    return _negative_lists(negatives, sequences, negatives_per).shape[1]


def _plain(
    outputs: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    sequences: Sequences,
    negatives_per: str,
    temperature: float,
) -> Tensor:
    if negatives_per == "sample":
        negatives = negatives.index_select(0, sequences.samples)
    choices = torch.cat([positives[:, None], negatives], dim=1)
    logits = (F.embedding(choices, rows) @ outputs[:, :, None]).squeeze(2) / temperature
    is_positive = choices == positives[:, None]
    is_positive[:, 0] = False
    logits = logits.masked_fill(is_positive, float("-inf"))
    return (logits.logsumexp(1) - logits[:, 0]).sum()


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, units: Tensor, rows: Tensor, work: _Work, temperature: float, is_trained: bool) -> Tensor:
        total = units.new_zeros(())
        d_units, d_rows = (torch.zeros_like(x) if is_trained else None for x in (units, rows))
        for part in _parts(work, rows.shape[1]):
            x, positives, is_token = units[part], work.positives[part], work.is_token[part]
            negatives = work.negatives.index_select(0, work.lists[part])
            positive_rows = _gather(rows, positives)
            negative_rows = _gather(rows, negatives)
            logits = torch.cat([(x * positive_rows).sum(2, keepdim=True), x @ negative_rows.transpose(1, 2)], dim=2)
            logits.div_(temperature)
            logits[:, :, 1:].masked_fill_(negatives[:, None, :] == positives[:, :, None], float("-inf"))
            logarithms = logits.logsumexp(2)
            total += ((logarithms - logits[:, :, 0]) * is_token).sum()
            if d_units is None or d_rows is None:
                continue
            slopes = logits.sub_(logarithms[:, :, None]).exp_()
            slopes[:, :, 0] -= 1
            slopes.div_(temperature)  # padding needs no mask: its x is zero, and its gradient is never read
            positive_slopes, negative_slopes = slopes[:, :, :1], slopes[:, :, 1:]
            d_units[part] = positive_slopes * positive_rows + negative_slopes @ negative_rows
            add_in_order(d_rows, positives.flatten(), (positive_slopes * x).flatten(0, 1))
            add_in_order(d_rows, negatives.flatten(), (negative_slopes.transpose(1, 2) @ x).flatten(0, 1))
        if d_units is not None and d_rows is not None:
            ctx.save_for_backward(d_units, d_rows)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        d_units, d_rows = ctx.saved_tensors
        return d_units * gradient, d_rows * gradient, None, None, None


def _parts(work: _Work, dim: int) -> list[slice]:
    num_units, tokens = work.positives.shape
    num_elements = elements_at_a_time(work.negatives, GATHERED_ELEMENTS)
    at_a_time = max(1, num_elements // (work.negatives.shape[1] * max(dim, tokens)))
    return [slice(first, first + at_a_time) for first in range(0, num_units, at_a_time)]


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    return rows.index_select(0, index.flatten()).view(*index.shape, rows.shape[1])


def add_in_order(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Adds source[i] to target[index[i]] in the order of i. Both are [n, dim].

    On an accelerator index_add_ uses atomic additions, whose order varies, and so may index_put_.
    """
    if adds_in_order(target):
        target.index_add_(0, index, source)
    else:
        add_sorted(target, index, source)


def add_sorted(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Sums the rows that go to each row of target, in order, then adds these sums."""
    if len(index) == 0:
        return
    order = index.argsort(stable=True)
    rows = torch.arange(len(target) + 1, device=index.device)
    starts = torch.searchsorted(index.index_select(0, order), rows)
    sorted_source = source.index_select(0, order)
    target.add_(torch.segment_reduce(sorted_source, "sum", offsets=starts, axis=0, initial=0, unsafe=True))
