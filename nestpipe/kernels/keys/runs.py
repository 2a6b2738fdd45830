"""Runs of equal keys in a sorted list of occurrences: marks them, numbers them, and lists what each occurrence is for.

Sorts and scans are torch's; here is what comes between them. Occurrence o of a batch has a key and a table. Sorted by
(table, key, occurrence), the occurrences of one key are a run, which begins with the key's first use.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from nestpipe.kernels.dispatch import runs_triton
from nestpipe.kernels.keys import reference


@dataclass(frozen=True)
class SortedKeys:
    """The occurrences of a batch, sorted by (table, key, occurrence)."""

    by_key: Tensor
    """[n] all keys, ascending."""
    key_order: Tensor
    """[n] occurrence of each key in by_key."""
    tables: Tensor | None
    """[n] int16: table of each sorted occurrence, ascending; num_tables for padding. None if all have table 0."""
    table_order: Tensor | None
    """[n] place in by_key of each sorted occurrence. None if they are the same."""
    num_tables: int


@dataclass(frozen=True)
class Runs:
    """The beginnings of runs."""

    occurrences: Tensor
    """[n] the sorted occurrences."""
    is_start: Tensor
    """[n] int32: 1 if a run begins at a sorted occurrence. Padding has no runs."""
    is_first_use: Tensor
    """[n] int32: the same by occurrence."""


def mark_runs(keys: SortedKeys) -> Runs:
    """Finds where runs begin."""
    occurrences = torch.empty_like(keys.key_order)
    is_start = torch.empty(len(occurrences), dtype=torch.int32, device=occurrences.device)
    runs = Runs(occurrences, is_start, torch.empty_like(is_start))
    if len(occurrences) > 0:
        _implementation(occurrences).mark_runs(keys, runs)
    return runs


def number_runs(
    keys: SortedKeys, runs: Runs, run_numbers: Tensor, use_numbers: Tensor, num_runs: int
) -> tuple[Tensor, Tensor]:
    """Returns the key of each run in order of first use, and for each occurrence the number of its run in that order,
    num_runs for padding.

    run_numbers, use_numbers: [n] sums of is_start and of is_first_use up to each entry, itself included.
    """
    distinct = torch.empty(num_runs, dtype=torch.int64, device=run_numbers.device)
    numbers = torch.empty_like(runs.occurrences)
    if len(numbers) > 0:
        by_run = torch.empty_like(distinct)
        arrays = run_numbers, use_numbers, distinct, by_run, numbers
        _implementation(numbers).number_runs(keys, runs, *arrays)
    return distinct, numbers


@dataclass(frozen=True)
class Blocks:
    """Blocks of consecutive occurrences, one for each micro-batch and feature, with numbers that describe them."""

    bounds: Tensor
    """[blocks + 1] first occurrence of each block, then the number of occurrences."""
    bases: Tensor
    """[blocks] number that is added to the row of an occurrence, so that the sums sort by what backward needs."""
    per_segment: Tensor
    """[blocks] factors of the segment of an occurrence, in its target."""
    per_occurrence: Tensor
    """[blocks] factors of the occurrence itself."""
    shifts: Tensor
    """[blocks] summands."""


def describe(rows: Tensor, segments: Tensor | None, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Returns for each occurrence o of a block b, with rows[o] and segments[o] (o itself if None), its sort key
    bases[b] + row and its target segment * per_segment[b] + o * per_occurrence[b] + shifts[b]."""
    sort_keys, targets = torch.empty_like(rows), torch.empty_like(rows)
    if len(rows) > 0:
        _implementation(rows).describe(rows, segments, blocks, sort_keys, targets)
    return sort_keys, targets


def _implementation(array: Tensor) -> ModuleType:
    if not runs_triton(array):
        return reference
    from nestpipe.kernels.keys import triton_runs

    return triton_runs
