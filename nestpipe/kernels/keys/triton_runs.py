"""Kernels that mark and number runs of equal keys, and describe occurrences."""

import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels.keys.runs import Blocks, Runs, SortedKeys
from nestpipe.kernels.launch import launch

_SIZE = 512
"""Occurrences of a program."""
_NUM_WARPS = 4


@triton.jit
def key_places(sorted_places, table_order, inside):
    return sorted_places if table_order is None else tl.load(table_order + sorted_places, mask=inside, other=0)


@triton.jit(do_not_specialize=["num_occurrences"])
def mark_kernel(
    by_key, key_order, tables, table_order, occurrences, is_start, is_first_use, num_occurrences, num_tables,
    SIZE: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = j < num_occurrences
    has_previous = inside & (j > 0)
    places = key_places(j, table_order, inside)
    previous = key_places(j - 1, table_order, has_previous)
    key = tl.load(by_key + places, mask=inside, other=0)
    starts = (j == 0) | (key != tl.load(by_key + previous, mask=has_previous, other=0))
    if tables is not None:
        table = tl.load(tables + j, mask=inside, other=0)
        starts = starts | (table != tl.load(tables + j - 1, mask=has_previous, other=0))
        starts = starts & (table < num_tables)
    occurrence = tl.load(key_order + places, mask=inside, other=0)
    tl.store(occurrences + j, occurrence, mask=inside)
    tl.store(is_start + j, starts.to(tl.int32), mask=inside)
    tl.store(is_first_use + occurrence, starts.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_occurrences"])
def list_kernel(
    by_key, table_order, occurrences, is_start, run_numbers, use_numbers, distinct, by_run, num_occurrences,
    SIZE: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    starts = tl.load(is_start + j, mask=j < num_occurrences, other=0) > 0
    occurrence = tl.load(occurrences + j, mask=starts, other=0)
    number = tl.load(use_numbers + occurrence, mask=starts, other=1).to(tl.int64) - 1
    run = tl.load(run_numbers + j, mask=starts, other=1).to(tl.int64) - 1
    key = tl.load(by_key + key_places(j, table_order, starts), mask=starts, other=0)
    tl.store(by_run + run, number, mask=starts)
    tl.store(distinct + number, key, mask=starts)


@triton.jit(do_not_specialize=["num_occurrences", "num_runs"])
def number_kernel(
    tables, occurrences, run_numbers, by_run, numbers, num_occurrences, num_tables, num_runs, SIZE: tl.constexpr
):
    j = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = j < num_occurrences
    has_run = inside
    if tables is not None:
        has_run = inside & (tl.load(tables + j, mask=inside, other=0) < num_tables)
    run = tl.load(run_numbers + j, mask=has_run, other=1).to(tl.int64) - 1
    number = tl.load(by_run + run, mask=has_run, other=0)
    occurrence = tl.load(occurrences + j, mask=inside, other=0)
    tl.store(numbers + occurrence, tl.where(has_run, number, num_runs), mask=inside)


@triton.jit(do_not_specialize=["num_occurrences"])
def describe_kernel(
    rows, segments, bounds, bases, per_segment, per_occurrence, shifts, sort_keys, targets, num_occurrences,
    NUM_BLOCKS: tl.constexpr, LEVELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = o < num_occurrences
    # The last block that begins at o or before it: blocks may be empty.
    block = tl.full((SIZE,), 0, tl.int32)
    for level in tl.static_range(LEVELS):
        candidate = block + (1 << (LEVELS - 1 - level))
        exists = inside & (candidate < NUM_BLOCKS)
        begins = tl.load(bounds + candidate, mask=exists, other=0)
        block = tl.where(exists & (begins <= o), candidate, block)
    segment = o if segments is None else tl.load(segments + o, mask=inside, other=0)
    row = tl.load(rows + o, mask=inside, other=0)
    tl.store(sort_keys + o, tl.load(bases + block) + row, mask=inside)
    by_segment, by_occurrence = segment * tl.load(per_segment + block), o * tl.load(per_occurrence + block)
    tl.store(targets + o, by_segment + by_occurrence + tl.load(shifts + block), mask=inside)


def mark_runs(keys: SortedKeys, runs: Runs) -> None:
    number = len(runs.occurrences)
    lists = keys.by_key, keys.key_order, keys.tables, keys.table_order
    marks = runs.occurrences, runs.is_start, runs.is_first_use
    _launch(mark_kernel, number, *lists, *marks, number, keys.num_tables)


def number_runs(
    keys: SortedKeys,
    runs: Runs,
    run_numbers: Tensor,
    use_numbers: Tensor,
    distinct: Tensor,
    by_run: Tensor,
    numbers: Tensor,
) -> None:
    number = len(numbers)
    marks = runs.occurrences, runs.is_start, run_numbers, use_numbers
    _launch(list_kernel, number, keys.by_key, keys.table_order, *marks, distinct, by_run, number)
    lists = keys.tables, runs.occurrences, run_numbers, by_run, numbers
    _launch(number_kernel, number, *lists, number, keys.num_tables, len(distinct))


def describe(rows: Tensor, segments: Tensor | None, blocks: Blocks, sort_keys: Tensor, targets: Tensor) -> None:
    number, num_blocks = len(rows), len(blocks.bases)
    tables = blocks.bounds, blocks.bases, blocks.per_segment, blocks.per_occurrence, blocks.shifts
    constants = {"NUM_BLOCKS": num_blocks, "LEVELS": num_blocks.bit_length()}
    _launch(describe_kernel, number, rows, segments, *tables, sort_keys, targets, number, **constants)


def _launch(kernel: object, num_occurrences: int, *arguments: object, **constants: int) -> None:
    num_programs = -(-num_occurrences // _SIZE)
    launch(kernel, num_programs, *arguments, SIZE=_SIZE, num_warps=_NUM_WARPS, **constants)
