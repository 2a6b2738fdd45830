"""Tests copies and additions of rows against numpy and against the reference, to the bit.

Fails, for example, if copy_kernel reads at `rows` instead of `from_rows`, if tile_of's mask ignores the width, or if
add_kernel stores the source instead of the sum.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from nestpipe.kernels.rows import reference
from nestpipe.kernels.rows.copy import add_rows, copy_rows, find_large
from tests.kernels.bits import ALL_DIMS, columns, same_bits

LARGEST = torch.finfo(torch.float32).max


def drawn_places(num: int, num_rows: int, device: torch.device) -> Tensor:
    return torch.randperm(num_rows)[:num].to(device)


def copied(source: Tensor, from_places: Tensor | None, target: Tensor, to_places: Tensor | None) -> Tensor:
    out, rows = target.cpu().numpy().copy(), source.cpu().numpy()
    places = next((p for p in (to_places, from_places) if p is not None), source)
    for i in range(len(places)):
        to = i if to_places is None else int(to_places[i])
        out[to] = rows[i if from_places is None else int(from_places[i])]
    return torch.from_numpy(out)


@ALL_DIMS
@pytest.mark.parametrize(("gathers", "scatters"), [(False, False), (False, True), (True, False), (True, True)])
def test_copy(dim: int, dtype: torch.dtype, gathers: bool, scatters: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    source, _ = columns(70, dim, dtype, device)
    target, whole = columns(90, dim, dtype, device)
    from_places = torch.randint(0, 70, (70,)).to(device) if gathers else None
    to_places = drawn_places(70, 90, device) if scatters else None
    before, expected = whole.clone(), copied(source, from_places, target, to_places)
    by_reference = target.clone()
    reference.copy_rows(source, from_places, by_reference, to_places)
    copy_rows(source, from_places, target, to_places)
    assert same_bits(target, expected)
    assert same_bits(by_reference, expected)
    whole[:, 2 : 2 + dim] = before[:, 2 : 2 + dim]
    assert same_bits(whole, before), "columns outside of the target changed"


def test_bits_are_kept(device: torch.device) -> None:
    bits = torch.tensor([[0x7FA00001, -0x80000000, 1, 0x7F800000]], dtype=torch.int32)
    source, target = bits.view(torch.float32).to(device), torch.zeros(1, 4, device=device)
    copy_rows(source, None, target, None)
    assert target.cpu().view(torch.int32).tolist() == bits.tolist()


@pytest.mark.parametrize("with_places", [True, False])
@ALL_DIMS
def test_add(dim: int, dtype: torch.dtype, with_places: bool, device: torch.device) -> None:
    torch.manual_seed(1)
    target, whole = columns(90, dim, dtype, device)
    source, _ = columns(70, dim, dtype, device)
    places = drawn_places(70, 90, device) if with_places else None
    before, by_reference = whole.clone(), target.clone()
    expected = target.cpu().numpy().copy()
    expected[np.arange(70) if places is None else places.cpu().numpy()] += source.cpu().numpy()
    reference.add_rows(by_reference, places, source, None, math.inf, None)
    add_rows(target, places, source)
    assert same_bits(target, torch.from_numpy(expected))
    assert same_bits(by_reference, target)
    whole[:, 2 : 2 + dim] = before[:, 2 : 2 + dim]
    assert same_bits(whole, before)


def test_nothing_to_do(device: torch.device) -> None:
    none, rows, target = (torch.zeros(n, 3, device=device) for n in (0, 2, 4))
    no_places = torch.empty(0, dtype=torch.int64, device=device)
    copy_rows(none, None, target, None)
    copy_rows(rows, no_places, target, None)
    copy_rows(rows, no_places, none, no_places)
    add_rows(target, None, none)
    add_rows(target, no_places, none)
    assert not target.any()


def test_fewer_places_than_rows(device: torch.device) -> None:
    source, target = torch.ones(5, 2, device=device), torch.zeros(5, 2, device=device)
    copy_rows(source, None, target, torch.tensor([3, 1], device=device))
    assert target[:, 0].tolist() == [0, 1, 0, 1, 0]


def test_refusals(device: torch.device) -> None:
    rows = torch.zeros(3, 4, device=device)
    for source, target, message in (
        (rows, rows.double(), "float32"),
        (rows, torch.zeros(3, 5, device=device), r"must have \[3, 4\]"),
        (rows, torch.zeros(4, 3, device=device).t(), "side by side"),
        (rows, torch.zeros(4, device=device).expand(3, 4), "overlap"),
        (rows, torch.zeros(2, 4, device=device), "2 rows only"),
    ):
        with pytest.raises(ValueError, match=message):
            copy_rows(source, None, target, None)
    with pytest.raises(ValueError, match="int64"):
        copy_rows(rows, torch.zeros(3, dtype=torch.int32, device=device), rows.clone(), None)
    with pytest.raises(ValueError, match="for 3 rows of source"):
        copy_rows(rows, None, torch.zeros(9, 4, device=device), torch.arange(4, device=device))


def test_pinned_host_memory(accelerator: torch.device) -> None:
    """The device reads and writes pinned host memory directly; memory that is not pinned is refused."""
    host = torch.randn(5000, 129).pin_memory()
    from_places, to_places = torch.randint(0, 5000, (3000,)), torch.randperm(5000)[:3000]
    on_device = torch.empty(3000, 128, device=accelerator)
    copy_rows(host[:, 1:], from_places.to(accelerator), on_device, None)
    assert same_bits(on_device, host[:, 1:][from_places])
    back = torch.zeros(5000, 128).pin_memory()
    copy_rows(on_device, None, back, to_places.pin_memory())
    torch.cuda.synchronize()
    assert same_bits(back[to_places], on_device)
    with pytest.raises(ValueError, match="pin_memory"):
        copy_rows(torch.zeros(3000, 128), None, on_device, None)


def test_more_than_2_to_the_31_elements(accelerator: torch.device) -> None:
    """Fails if tile_of's rows are int32. It needs an accelerator: the interpreter would touch all of the memory."""
    large = torch.empty(2**31 // 64 + 100, 64, device=accelerator)
    places = torch.tensor([len(large) - 1, 0, len(large) - 90], device=accelerator)
    rows = torch.randn(3, 64, device=accelerator)
    copy_rows(rows, None, large, places)
    add_rows(large, places, rows)
    again = torch.empty_like(rows)
    copy_rows(large, places, again, None)
    assert same_bits(again, rows + rows)
    tail = torch.empty(200, 64, device=accelerator)
    copy_rows(large[-200:], None, tail, None)
    assert same_bits(tail, large[-200:])


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (40, 7), (33, 128), (5, 600)])
def test_first_rows_replace_the_target(device: torch.device, num_rows: int, width: int) -> None:
    """Fails if add_kernel adds to the target, here NaN, where is_first is set."""
    generator = torch.Generator().manual_seed(width)
    places = torch.randperm(num_rows + 3, generator=generator)[:num_rows]
    is_first = torch.rand(num_rows, generator=generator) < 0.5
    target, source = torch.randn(num_rows + 3, width, generator=generator), torch.randn(num_rows, width)
    expected = target.clone()
    expected[places] = torch.where(is_first[:, None], source, target[places] + source)
    target[places[is_first]] = float("nan")
    arrays = [array.to(device) for array in (target, places, source, is_first)]
    exceeds = torch.zeros(1, dtype=torch.int32, device=device)
    add_rows(*arrays, LARGEST / 4, exceeds)
    assert torch.equal(arrays[0].cpu(), expected)
    assert int(exceeds) == 0


PLACES = (0, 8 * 130 - 1, 8 * 130, 9 * 130 - 1)
"""The first and the last element, and both sides of the end of a row."""


@pytest.mark.parametrize(
    ("bad", "is_first", "where"),
    [
        (bad, is_first, PLACES[(i + j) % len(PLACES)])
        for i, bad in enumerate([float("nan"), float("inf"), -float("inf"), LARGEST / 3, -LARGEST / 3])
        for j, is_first in enumerate([True, False])
    ],
)
def test_exceeds_finds_non_finite_and_large_sums(device: torch.device, bad: float, is_first: bool, where: int) -> None:
    """Finds them at any place, in target or source. Fails if store_if_large tests `values != values` only, or does not
    take magnitudes. The reference finds the same."""
    places, flags = torch.arange(9, device=device), torch.full((9,), is_first, device=device)
    for add in (add_rows, reference.add_rows):
        target, source = torch.ones(9, 130, device=device), torch.ones(9, 130, device=device)
        (source if is_first else target).view(-1)[where] = bad
        exceeds = torch.zeros(1, dtype=torch.int32, device=device)
        add(target, places, source, flags, LARGEST / 4, exceeds)
        assert int(exceeds) == 1
    for find in (find_large, reference.find_large):
        exceeds.zero_()
        find(source if is_first else target[:, :130], LARGEST / 4, exceeds)
        assert int(exceeds) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_limit_itself_is_not_too_large(device: torch.device, dtype: torch.dtype) -> None:
    """Fails if store_if_large compares with `<`, or rounds the limit of float64 to float32."""
    limit = torch.finfo(dtype).max / 6
    one = torch.ones((), dtype=dtype) * limit
    for value, expected in ((one, 0), (-one, 0), (one.nextafter(one * 2), 1), (-one.nextafter(one * 2), 1)):
        for add in (add_rows, reference.add_rows):
            target, source = (
                torch.zeros(5, 3, dtype=dtype, device=device),
                torch.zeros(5, 3, dtype=dtype, device=device),
            )
            source[3, 1] = value
            exceeds = torch.zeros(1, dtype=torch.int32, device=device)
            add(target, None, source, None, limit if dtype is torch.float64 else float(one), exceeds)
            assert int(exceeds) == expected
        for find in (find_large, reference.find_large):
            exceeds.zero_()
            find(source, limit if dtype is torch.float64 else float(one), exceeds)
            assert int(exceeds) == expected


def test_exceeds_is_never_reset(device: torch.device) -> None:
    """Fails if add_kernel stores 0 if no sum is too large."""
    exceeds = torch.ones(1, dtype=torch.int32, device=device)
    add_rows(torch.ones(2, 3, device=device), None, torch.ones(2, 3, device=device), None, 100.0, exceeds)
    assert int(exceeds) == 1


def test_is_first_has_the_length_of_source() -> None:
    with pytest.raises(ValueError, match=r"is_first is torch.bool of shape \[2\], must be bool \[3\]"):
        add_rows(torch.zeros(3, 2), None, torch.zeros(3, 2), torch.zeros(2, dtype=torch.bool))
