"""The operations in plain torch: the kernels' oracle, and what runs on an accelerator without Triton."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nestpipe.kernels.keys.runs import Blocks, Runs, SortedKeys


def mark_runs(keys: "SortedKeys", runs: "Runs") -> None:
    sorted_keys, occurrences = keys.by_key, keys.key_order
    if keys.table_order is not None:
        sorted_keys, occurrences = sorted_keys[keys.table_order], occurrences[keys.table_order]
    is_start = torch.ones(len(sorted_keys), dtype=torch.bool, device=sorted_keys.device)
    is_start[1:] = sorted_keys[1:] != sorted_keys[:-1]
    if keys.tables is not None:
        is_start[1:] |= keys.tables[1:] != keys.tables[:-1]
        is_start &= keys.tables < keys.num_tables
    runs.occurrences.copy_(occurrences)
    runs.is_start.copy_(is_start)
    runs.is_first_use.index_copy_(0, occurrences, runs.is_start)


def number_runs(
    keys: "SortedKeys",
    runs: "Runs",
    run_numbers: Tensor,
    use_numbers: Tensor,
    distinct: Tensor,
    by_run: Tensor,
    numbers: Tensor,
) -> None:
    starts = runs.is_start.nonzero().flatten()
    by_run.copy_(use_numbers[runs.occurrences[starts]] - 1)
    sorted_keys = keys.by_key if keys.table_order is None else keys.by_key[keys.table_order]
    distinct.index_copy_(0, by_run, sorted_keys[starts])
    padded = torch.cat([by_run, by_run.new_zeros(1)])  # if all is padding, there are no runs
    of_runs = padded[(run_numbers.long() - 1).clamp(min=0)]
    if keys.tables is not None:
        of_runs = torch.where(keys.tables < keys.num_tables, of_runs, len(distinct))
    numbers.index_copy_(0, runs.occurrences, of_runs)


def describe(rows: Tensor, segments: Tensor | None, blocks: "Blocks", sort_keys: Tensor, targets: Tensor) -> None:
    occurrences = torch.arange(len(rows), device=rows.device)
    block = torch.bucketize(occurrences, blocks.bounds[1:], right=True)
    segments = occurrences if segments is None else segments
    sort_keys.copy_(blocks.bases[block] + rows)
    by_segment, by_occurrence = segments * blocks.per_segment[block], occurrences * blocks.per_occurrence[block]
    targets.copy_(by_segment + by_occurrence + blocks.shifts[block])
