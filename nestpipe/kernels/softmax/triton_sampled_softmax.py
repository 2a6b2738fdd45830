"""Kernels of the sampled softmax: everything before, between and after its three products of matrices.

A unit is a block of tokens (see nestpipe.kernels.attention.tiles) with the negatives of its sample. For each slot of
each unit, `per_token` has the length of its output, the length of its positive's row, the positive's logit, which is
later replaced by its slope, and the loss. Lengths are at least SMALLEST_NORM. Padding slots are zero and have no loss.
"""

import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels.attention.triton_blocks import FIELDS
from nestpipe.kernels.softmax.sampled_softmax import Work
from nestpipe.kernels.softmax.triton_unit_vectors import divide, load_rows, norms, store_rows, unit_backward
from nestpipe.kernels.triton_tiles import launch, power_of_two

_SIZE = 2048
"""Elements of a tile: with more, gradients_kernel needs too many registers for several programs to run at once."""
_NUM_WARPS = 4
_COUNTS = ["first_unit", "num_units", "num_slots", "num_tokens", "num_samples"]


@triton.jit
def load_unit(blocks, unit):
    """Returns the unit's number in its sample, and the sample's first token, length and number."""
    fields = blocks + unit * FIELDS
    number, first, length, sample = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 4)
    return number.to(tl.int64), first.to(tl.int64), length.to(tl.int64), sample.to(tl.int64)


@triton.jit
def load_tokens(blocks, unit, tile, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Returns, for a tile of a unit, the tokens, their sample, which exist, and which are last in it, [ROWS] each."""
    number, first, length, sample = load_unit(blocks, unit)
    places = number * SIZE + tile * ROWS + tl.arange(0, ROWS)
    return first + places, tl.zeros_like(places) + sample, places < length, places == length - 1


@triton.jit
def load_positives(history, target, tokens, samples, exists, is_last, DIM: tl.constexpr, PAD: tl.constexpr):
    """Returns the row of the item after each token."""
    following = load_rows(history, tokens + 1, exists & (is_last == 0), DIM, PAD)
    return tl.where(is_last[:, None], load_rows(target, samples, is_last, DIM, PAD), following)


@triton.jit
def place_tokens(
    outputs, history, target, x, per_token, blocks, unit, first_unit, num_slots, scale, tile, DIM, PAD, SIZE, ROWS
):
    tokens, samples, exists, is_last = load_tokens(blocks, first_unit + unit, tile, SIZE, ROWS)
    slots = unit * SIZE + tile * ROWS + tl.arange(0, ROWS)
    everywhere = slots >= 0
    output_rows = load_rows(outputs, tokens, exists, DIM, PAD)
    lengths = norms(output_rows)
    unit_outputs = divide(output_rows, lengths)
    store_rows(x, slots, unit_outputs, everywhere, DIM, PAD)
    positives = load_positives(history, target, tokens, samples, exists, is_last, DIM, PAD)
    positive_lengths = norms(positives)
    cosines = tl.sum(unit_outputs * divide(positives, positive_lengths), axis=1)
    at = per_token + first_unit * SIZE + slots
    tl.store(at, lengths)
    tl.store(at + num_slots, positive_lengths)
    tl.store(at + 2 * num_slots, cosines * tl.full((), scale, tl.float32))


@triton.jit
def place_negatives(negatives, unit_negatives, blocks, unit, first_unit, tile, COUNT, DIM, PAD, ROWS):
    _, _, _, sample = load_unit(blocks, first_unit + unit)
    numbers = tile * ROWS + tl.arange(0, ROWS)
    rows = load_rows(negatives, sample * COUNT + numbers, numbers < COUNT, DIM, PAD)
    store_rows(unit_negatives, unit * COUNT + numbers, divide(rows, norms(rows)), numbers < COUNT, DIM, PAD)


@triton.jit(do_not_specialize=_COUNTS)
def place_kernel(
    outputs, history, target, negatives, x, unit_negatives, per_token, blocks, first_unit, num_slots,
    scale: tl.float64,
    COUNT: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores unit vectors of outputs and of the negatives of each unit, and the positives' logits."""
    token_tiles: tl.constexpr = SIZE // ROWS
    tiles: tl.constexpr = token_tiles + (COUNT + ROWS - 1) // ROWS
    unit, tile = tl.program_id(0).to(tl.int64) // tiles, tl.program_id(0) % tiles
    if tile < token_tiles:
        place_tokens(
            outputs,
            history,
            target,
            x,
            per_token,
            blocks,
            unit,
            first_unit,
            num_slots,
            scale,
            tile,
            DIM,
            PAD,
            SIZE,
            ROWS,
        )
    else:
        place_negatives(negatives, unit_negatives, blocks, unit, first_unit, tile - token_tiles, COUNT, DIM, PAD, ROWS)


@triton.jit(do_not_specialize=_COUNTS)
def softmax_kernel(
    products, per_token, history_index, target_index, negatives_index, blocks, first_unit, num_slots,
    scale: tl.float64,
    COUNT: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, IS_TRAINED: tl.constexpr,
):  # fmt: skip
    """Stores losses, and replaces the products with negatives and the positives' logits by their slopes."""
    tiles: tl.constexpr = SIZE // ROWS
    unit, tile = tl.program_id(0).to(tl.int64) // tiles, tl.program_id(0) % tiles
    tokens, samples, exists, is_last = load_tokens(blocks, first_unit + unit, tile, SIZE, ROWS)
    positives = tl.load(history_index + tokens + 1, mask=exists & (is_last == 0), other=0)
    positives = tl.where(is_last, tl.load(target_index + samples, mask=is_last, other=0), positives)
    columns = tl.arange(0, PAD)
    slots = unit * SIZE + tile * ROWS + tl.arange(0, ROWS)
    inside = exists[:, None] & (columns < COUNT)[None, :]
    negatives = tl.load(negatives_index + samples[:, None] * COUNT + columns[None, :], mask=inside, other=0)
    is_counted = inside & (negatives != positives[:, None])
    factor = tl.full((), scale, tl.float32)
    at = products + slots[:, None] * COUNT + columns[None, :]
    logits = tl.where(is_counted, tl.load(at, mask=inside, other=0.0) * factor, float("-inf"))
    slots_at = per_token + first_unit * SIZE + slots
    logit = tl.load(slots_at + 2 * num_slots)
    largest = tl.maximum(tl.max(logits, axis=1), logit)
    weights = tl.exp(logits - largest[:, None])
    others = tl.sum(weights, axis=1)
    total = others + tl.exp(logit - largest)
    tl.store(slots_at + 3 * num_slots, tl.where(exists, tl.log(total) + (largest - logit), 0.0))
    if IS_TRAINED:
        each = tl.where(exists, tl.math.div_rn(tl.zeros_like(total) + factor, total), 0.0)
        tl.store(at, weights * each[:, None], mask=(columns < COUNT)[None, :] & (slots >= 0)[:, None])
        tl.store(slots_at + 2 * num_slots, -(others * each))


@triton.jit
def token_gradients(
    history, target, x, d_x, per_token, gradients, blocks, unit, first_unit, num_slots, num_tokens, tile, DIM, PAD,
    SIZE, ROWS,
):  # fmt: skip
    tokens, samples, exists, is_last = load_tokens(blocks, first_unit + unit, tile, SIZE, ROWS)
    slots = unit * SIZE + tile * ROWS + tl.arange(0, ROWS)
    at = per_token + first_unit * SIZE + slots
    lengths, positive_lengths, slopes = tl.load(at), tl.load(at + num_slots), tl.load(at + 2 * num_slots)
    unit_outputs = load_rows(x, slots, exists, DIM, PAD)
    positives = divide(load_positives(history, target, tokens, samples, exists, is_last, DIM, PAD), positive_lengths)
    d_outputs = load_rows(d_x, slots, exists, DIM, PAD) + slopes[:, None] * positives
    store_rows(gradients, tokens, unit_backward(d_outputs, unit_outputs, lengths), exists, DIM, PAD)
    d_positives = unit_backward(slopes[:, None] * unit_outputs, positives, positive_lengths)
    places = num_tokens + tl.where(is_last, num_tokens + samples, tokens + 1)
    store_rows(gradients, places, d_positives, exists, DIM, PAD)


@triton.jit
def negative_gradients(
    negatives, d_negatives, gradients, blocks, unit, first_unit, num_units, first_row, tile, COUNT, DIM, PAD, SIZE, ROWS
):
    """Sums the gradients of the units of a sample, in order, in the program of the first of them."""
    number, _, length, sample = load_unit(blocks, first_unit + unit)
    left = (length + SIZE - 1) // SIZE - number
    if (number == 0) | (unit == 0):
        numbers = tile * ROWS + tl.arange(0, ROWS)
        exists = numbers < COUNT
        rows = sample * COUNT + numbers
        # If a sample's units are launched in several parts, the sum continues from what the last part stored.
        total = load_rows(gradients, first_row + rows, exists & (number > 0), DIM, PAD)
        end = unit + tl.minimum(left, num_units - unit)
        summed = unit
        while summed < end:
            total += load_rows(d_negatives, summed * COUNT + numbers, exists, DIM, PAD)
            summed += 1
        values = load_rows(negatives, rows, exists, DIM, PAD)
        lengths = norms(values)
        whole = unit_backward(total, divide(values, lengths), lengths)
        store_rows(gradients, first_row + rows, tl.where(end - unit == left, whole, total), exists, DIM, PAD)


@triton.jit(do_not_specialize=_COUNTS)
def gradients_kernel(
    history, target, negatives, x, d_x, d_negatives, per_token, gradients, blocks, first_unit, num_units, num_slots,
    num_tokens, num_samples,
    COUNT: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores gradients of outputs, history, target and negatives, concatenated, from those of unit vectors."""
    token_tiles: tl.constexpr = SIZE // ROWS
    tiles: tl.constexpr = token_tiles + (COUNT + ROWS - 1) // ROWS
    unit, tile = tl.program_id(0).to(tl.int64) // tiles, tl.program_id(0) % tiles
    if tile < token_tiles:
        token_gradients(
            history,
            target,
            x,
            d_x,
            per_token,
            gradients,
            blocks,
            unit,
            first_unit,
            num_slots,
            num_tokens,
            tile,
            DIM,
            PAD,
            SIZE,
            ROWS,
        )
    else:
        negative_gradients(
            negatives,
            d_negatives,
            gradients,
            blocks,
            unit,
            first_unit,
            num_units,
            2 * num_tokens + num_samples,
            tile - token_tiles,
            COUNT,
            DIM,
            PAD,
            SIZE,
            ROWS,
        )


def place(work: Work, first_unit: int, num_units: int, x: Tensor, unit_negatives: Tensor) -> None:
    size, rows, per_sample = work.tiles.size, _rows(work.dim, work.tiles.size), work.num_negatives
    launch(
        place_kernel,
        num_units * _num_tiles(size, per_sample, rows),
        *work.values,
        x,
        unit_negatives,
        work.per_token,
        work.tiles.blocks,
        first_unit,
        work.num_slots,
        work.scale,
        COUNT=per_sample,
        DIM=work.dim,
        PAD=power_of_two(work.dim),
        SIZE=size,
        ROWS=rows,
        num_warps=_NUM_WARPS,
    )


def softmax(work: Work, first_unit: int, num_units: int, products: Tensor) -> None:
    size, per_sample = work.tiles.size, work.num_negatives
    rows = _rows(per_sample, size)
    launch(
        softmax_kernel,
        num_units * (size // rows),
        products,
        work.per_token,
        *work.index,
        work.tiles.blocks,
        first_unit,
        work.num_slots,
        work.scale,
        COUNT=per_sample,
        PAD=power_of_two(per_sample),
        SIZE=size,
        ROWS=rows,
        IS_TRAINED=work.gradients is not None,
        num_warps=_NUM_WARPS,
    )


def gradients(work: Work, first_unit: int, num_units: int, x: Tensor, d_x: Tensor, d_negatives: Tensor) -> None:
    size, rows, per_sample = work.tiles.size, _rows(work.dim, work.tiles.size), work.num_negatives
    _, history, target, negatives = work.values
    launch(
        gradients_kernel,
        num_units * _num_tiles(size, per_sample, rows),
        history,
        target,
        negatives,
        x,
        d_x,
        d_negatives,
        work.per_token,
        work.gradients,
        work.tiles.blocks,
        first_unit,
        num_units,
        work.num_slots,
        len(history),
        len(target),
        COUNT=per_sample,
        DIM=work.dim,
        PAD=power_of_two(work.dim),
        SIZE=size,
        ROWS=rows,
        num_warps=_NUM_WARPS,
    )


def _rows(width: int, size: int) -> int:
    """Returns the rows of a tile, by its width alone, so that bits do not depend on what else is in the launch."""
    return min(size, max(1, _SIZE // power_of_two(width)))


def _num_tiles(size: int, per_sample: int, rows: int) -> int:
    """Returns the number of tiles of a unit: those of its tokens, then those of its negatives."""
    return size // rows + -(-per_sample // rows)
