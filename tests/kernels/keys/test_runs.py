"""Tests runs of equal keys and the description of occurrences, by kernels and in plain torch, against plain Python.

Fails, for example, if mark_kernel does not compare tables, if list_kernel numbers runs in the order of their keys
(`number = run`), if number_kernel gives padding the number of a run, or if describe_kernel takes a block that begins
after the occurrence (`begins <= o + 1`).
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nestpipe.kernels.keys import runs as runs_module
from nestpipe.kernels.keys.runs import Blocks, SortedKeys, describe, mark_runs, number_runs

SIZE = 512
"""Occurrences of a program."""
EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, 2**62]


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    by_kernels = request.param == "kernels"
    monkeypatch.setattr(runs_module, "runs_triton", lambda *arrays: by_kernels)
    return str(request.param)


Occurrences = list[tuple[int, int]]
"""Table and key of each; the number of tables stands for padding."""


def drawn(num_occurrences: int, num_tables: int, num_keys: int, with_padding: bool = True) -> Occurrences:
    """Draws occurrences in order of table, as those of a batch are; padding is anywhere."""
    generator = torch.Generator().manual_seed(num_occurrences)
    tables = torch.randint(num_tables, (num_occurrences,), generator=generator).sort()[0].tolist()
    keys = torch.randint(-num_keys // 2, num_keys // 2, (num_occurrences,), generator=generator).tolist()
    is_padding = (torch.rand(num_occurrences, generator=generator) < 0.2 * with_padding).tolist()
    numbers = zip(tables, keys, is_padding, strict=True)
    return [(num_tables if padding else table, key) for table, key, padding in numbers]


CASES: dict[str, tuple[int, Occurrences]] = {
    "several tables": (3, drawn(60, 3, 12)),
    "one table": (1, drawn(50, 1, 12, with_padding=False)),
    "one table and padding": (1, drawn(50, 1, 12)),
    "tables in any order": (3, drawn(60, 3, 12)[::-1]),
    "many tables": (3000, drawn(100, 3000, 2)),
    "all equal": (1, [(0, 7)] * 9),
    "equal in two tables": (2, [(0, 7)] * 4 + [(1, 7)] * 5),
    "only in the last table": (4, [(3, 7), (3, 6), (4, 6), (3, 7)]),
    "all distinct": (2, [(0, key) for key in range(9, 0, -1)] + [(1, key) for key in range(9)]),
    "all padding": (2, [(2, 7)] * 5 + [(2, 8)]),
    "padding with the key of a row": (1, [(1, 7), (0, 7), (1, 7), (0, 3), (1, 9)]),
    "one occurrence": (1, [(0, 7)]),
    "one of padding": (1, [(1, 7)]),
    "none": (2, []),
    "extreme keys": (2, [(table, key) for table in (0, 1) for key in EXTREMES * 2]),
    "a whole program": (1, [(0, 7)] * SIZE),
    "a run in two programs": (2, [(0, 7)] * (SIZE + 1) + [(1, 7)]),
    "three programs": (3, drawn(2 * SIZE + 100, 3, 300)),
    "three programs of one table": (1, drawn(2 * SIZE + 1, 1, 40, with_padding=False)),
}


def sorted_keys(occurrences: Occurrences, num_tables: int, device: torch.device) -> SortedKeys:
    """Sorts by (table, key, occurrence). Lists of tables are left out if all occurrences are of table 0."""
    keys = torch.tensor([key for _, key in occurrences], dtype=torch.int64)
    tables = torch.tensor([table for table, _ in occurrences], dtype=torch.int16)
    by_key, key_order = keys.sort(stable=True)
    arrays = by_key, key_order, None, None
    if num_tables > 1 or bool(tables.any()):
        arrays = by_key, key_order, *tables[key_order].sort(stable=True)
    return SortedKeys(*(None if array is None else array.to(device) for array in arrays), num_tables)


@pytest.mark.parametrize("name", CASES)
def test_marks(name: str, device: torch.device) -> None:
    num_tables, occurrences = CASES[name]
    runs = mark_runs(sorted_keys(occurrences, num_tables, device))
    order = sorted(range(len(occurrences)), key=lambda o: (*occurrences[o], o))
    before = [None, *(occurrences[o] for o in order)]
    is_start = [
        int(occurrences[o] != previous and occurrences[o][0] < num_tables)
        for o, previous in zip(order, before, strict=False)
    ]
    assert runs.occurrences.tolist() == order
    assert runs.is_start.tolist() == is_start
    firsts = {o for o, starts in zip(order, is_start, strict=True) if starts}
    assert runs.is_first_use.tolist() == [int(o in firsts) for o in range(len(occurrences))]
    assert runs.is_start.dtype == runs.is_first_use.dtype == torch.int32


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, device: torch.device) -> None:
    """Runs are numbered in order of first use; the number of runs stands for padding."""
    num_tables, occurrences = CASES[name]
    keys = sorted_keys(occurrences, num_tables, device)
    runs = mark_runs(keys)
    sums = [marks.cumsum(0, dtype=torch.int32) for marks in (runs.is_start, runs.is_first_use)]
    firsts = list(dict.fromkeys(one for one in occurrences if one[0] < num_tables))
    distinct, numbers = number_runs(keys, runs, *sums, len(firsts))
    assert distinct.tolist() == [key for _, key in firsts]
    places = {one: number for number, one in enumerate(firsts)}
    assert numbers.tolist() == [places.get(one, len(firsts)) for one in occurrences]


def make_blocks(sizes: list[int], device: torch.device) -> Blocks:
    """Makes blocks as views of one array, as the product does."""
    numbers = torch.randint(-(2**40), 2**40, (5, len(sizes) + 1), generator=torch.Generator().manual_seed(len(sizes)))
    numbers[0] = torch.tensor([0, *sizes]).cumsum(0)
    numbers[2:4] %= 50
    on_device = numbers.to(device)
    return Blocks(on_device[0], *on_device[1:, :-1])


SIZES = {
    "one block": [7],
    "two blocks": [3, 5],
    "empty blocks": [0, 0, 3, 0, 1, 0, 0, 9, 0],
    "a power of two": [1, 2, 0, 4, 5, 0, 7, 8],
    "one fewer": [1, 2, 0, 4, 5, 0, 7],
    "one occurrence in the last block": [0, 0, 0, 0, 1],
    "one occurrence in the first block": [1, 0, 0, 0],
    "many blocks": [i % 3 for i in range(130)],
    "three programs": [400, 0, SIZE - 400, 1, SIZE, 30],
    "no occurrence": [0, 0, 0],
}


@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_descriptions(name: str, has_segments: bool, device: torch.device) -> None:
    """Fails if describe_kernel searches with LEVELS - 1 steps, or if `describe` takes an occurrence for its segment."""
    sizes, blocks = SIZES[name], make_blocks(SIZES[name], device)
    number = sum(sizes)
    generator = torch.Generator().manual_seed(number)
    rows, segments = (torch.randint(0, 2**33, (number,), generator=generator) for _ in range(2))
    got = describe(rows.to(device), segments.to(device) if has_segments else None, blocks)
    expected = expected_descriptions(rows, segments if has_segments else torch.arange(number), blocks)
    assert [array.tolist() for array in got] == expected


def expected_descriptions(rows: Tensor, segments: Tensor, blocks: Blocks) -> list[list[int]]:
    sort_keys, targets, row_list, segment_list = [], [], rows.tolist(), segments.tolist()
    numbers = zip(blocks.bases, blocks.per_segment, blocks.per_occurrence, blocks.shifts, strict=True)
    for (first, end), block in zip(pairwise(blocks.bounds.tolist()), numbers, strict=True):
        base, per_segment, per_occurrence, shift = map(int, block)
        for o in range(first, end):
            sort_keys.append(base + row_list[o])
            targets.append(segment_list[o] * per_segment + o * per_occurrence + shift)
    return [sort_keys, targets]
