"""Copying, adding and summing rows against torch's own indexing and plain loops.

Fails, for example, if copy_rows of csrc/src/row_ops.cpp takes places in rows where they are in units, if add_rows
leaves -0.0 where a row is first, or if sum_rows begins the segment after an empty one with what it held.
"""

import math

import pytest
import torch
from torch import Tensor

from nestpipe.store.native.row_ops import add_rows, copy_rows, read_rows, sum_rows, write_rows

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
THREADS = pytest.mark.parametrize("num_threads", [1, 3])
SHAPES = pytest.mark.parametrize(("num_rows", "dim", "gap"), [(0, 3, 0), (1, 1, 4), (50, 7, 2), (9000, 130, 6)])


def random_rows(num_rows: int, dim: int, gap: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns random rows with a gap behind each, also behind the last one."""
    return torch.randn(num_rows, dim + gap, generator=torch.Generator().manual_seed(seed), dtype=dtype)[:, :dim]


def permutation(num_rows: int, count: int) -> Tensor:
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(count))[:count]


@DTYPES
@THREADS
@SHAPES
def test_copy_rows(dtype: torch.dtype, num_threads: int, num_rows: int, dim: int, gap: int) -> None:
    source = random_rows(2 * num_rows, dim, gap, dtype, 1)
    for from_places in (permutation(2 * num_rows, num_rows), None):
        for to_places in (
            permutation(2 * num_rows, 2 * num_rows)[: num_rows if from_places is not None else None],
            None,
        ):
            count = 2 * num_rows if from_places is None else num_rows
            target = random_rows(2 * num_rows if to_places is not None else count, dim, 0, dtype, 2)
            expected = target.clone()
            expected[slice(None) if to_places is None else to_places] = (
                source if from_places is None else source[from_places]
            )
            copy_rows(source, from_places, target, to_places, num_threads)
            assert torch.equal(target, expected)


@THREADS
def test_messages_in_units_finer_than_rows(num_threads: int) -> None:
    rows = random_rows(5000, 6, 2, torch.float32, 1)  # 24 bytes
    message = torch.zeros(5000 * 24 + 40, dtype=torch.uint8)
    places = permutation(5000, 5000) * 3 + 2
    write_rows(rows, None, message, 8, places, num_threads)
    held = message[16 : 16 + 5000 * 24].view(torch.float32).view(5000, 6)
    assert torch.equal(held[(places - 2) // 3], rows)
    assert not message[:16].any()
    assert not message[-24:].any()
    back = torch.zeros(5000, 6)
    read_rows(message, 8, places, back, None, num_threads)
    assert torch.equal(back, rows)
    some = torch.tensor([4, 0])
    read_rows(message, 8, places[:2], back, some)
    assert torch.equal(back[some], rows[:2])
    write_rows(rows, some, message, 24, None)
    assert torch.equal(message[:48].view(torch.float32).view(2, 6), rows[some])
    copy_rows(held, places[:3] - 2, back, None, from_unit=8)
    assert torch.equal(back[:3], rows[:3])


def test_copy_refusals() -> None:
    source, target, inside = torch.ones(4, 3), torch.zeros(4, 3), torch.tensor([0, 3])
    for wrong in (4, -1, 2**62, 2**63 - 1, -(2**63)):
        with pytest.raises(ValueError, match=rf"from: place number 1 is {wrong}, .* has place 3"):
            copy_rows(source, torch.tensor([0, wrong]), target, inside)
        with pytest.raises(ValueError, match=f"to: place number 1 is {wrong}"):
            copy_rows(source, inside, target, torch.tensor([0, wrong]))
    message = torch.zeros(23, dtype=torch.uint8)
    for places in (torch.tensor([0, 3]), None):
        with pytest.raises(
            ValueError, match=r"to: place number 1 is 3|to has 23 bytes, too few for 2 rows of 12 bytes"
        ):
            write_rows(source, inside, message, 4 if places is not None else 12, places)
    with pytest.raises(ValueError, match="stride"):
        write_rows(source, inside, message, 0, inside)
    with pytest.raises(ValueError, match="to_places must have shape"):
        copy_rows(source, inside, target, torch.tensor([0]))
    with pytest.raises(ValueError, match="rows of source and target differ"):
        copy_rows(source, inside, torch.zeros(4, 2), inside)
    with pytest.raises(ValueError, match="source has 4 rows, target 3"):
        copy_rows(source, None, target[:3], None)
    with pytest.raises(ValueError, match="source must be an array of dense rows"):
        copy_rows(source.T, inside, target, inside)
    with pytest.raises(ValueError, match="must not require a gradient"):
        copy_rows(source, inside, torch.zeros(4, 3, requires_grad=True), inside)
    assert not target.any()
    assert not message.any()


@DTYPES
@THREADS
@SHAPES
def test_add_rows(dtype: torch.dtype, num_threads: int, num_rows: int, dim: int, gap: int) -> None:
    source, target = random_rows(num_rows, dim, gap, dtype, 1), random_rows(3 * num_rows, dim, gap + 1, dtype, 2)
    places, is_first = permutation(3 * num_rows, num_rows), torch.arange(num_rows) % 3 == 0
    source[:, 0] = -0.0
    expected, exceeds = target.clone(), torch.zeros(1, dtype=torch.int32)
    expected[places] = torch.where(is_first[:, None], 0.0 + source, expected[places] + source)
    add_rows(target, places, source, is_first, math.inf, exceeds, num_threads)
    assert torch.equal(target, expected)
    assert not target[places[is_first], 0].signbit().any()
    expected[:num_rows] += source
    add_rows(target[:num_rows], None, source, num_threads=num_threads)
    assert torch.equal(target, expected)
    assert exceeds.item() == 0


@DTYPES
@THREADS
def test_limit(dtype: torch.dtype, num_threads: int) -> None:
    def result(value: float, limit: float, place: int) -> int:
        source, exceeds = torch.zeros(30_000, 33, dtype=dtype), torch.zeros(1, dtype=torch.int32)
        source.view(-1)[place] = value
        add_rows(
            torch.ones_like(source), None, source, torch.ones(30_000, dtype=torch.bool), limit, exceeds, num_threads
        )
        return int(exceeds)

    largest = torch.finfo(dtype).max
    for place in (0, 32, 500_000, 30_000 * 33 - 1):
        assert [result(value, 2.0, place) for value in (2.0, -2.0, 2.001, -2.001, math.nan, -math.inf)] == [0, 0] + [
            1
        ] * 4
    assert [result(math.inf, math.inf, 7), result(math.nan, math.inf, 7)] == [0, 1]
    assert [result(math.inf, largest, 7), result(largest, largest, 7), result(0.0, -1.0, 7)] == [1, 0, 1]
    between = 1.0 + torch.finfo(dtype).eps / 4 if dtype == torch.float32 else 1.0
    assert [result(1.0, between, 7), result(1.0 + torch.finfo(dtype).eps, between, 7)] == [0, 1]
    assert result(1.0, 1 - 1e-12, 7) == 1
    if dtype == torch.float32:
        assert [result(largest, 1e300, 7), result(math.inf, 1e300, 7), result(0.0, -1e300, 7)] == [0, 1, 1]


def test_exceeds_stays() -> None:
    exceeds = torch.ones(1, dtype=torch.int32)
    add_rows(torch.zeros(2, 2), None, torch.zeros(2, 2), limit=1.0, exceeds=exceeds)
    assert exceeds.item() == 1


def test_add_refusals() -> None:
    source, target, inside = torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([0, 3])
    with pytest.raises(ValueError, match="target: place number 0 is 4"):
        add_rows(target, torch.tensor([4, 0]), source)
    with pytest.raises(ValueError, match="target has 4 rows, source 2"):
        add_rows(target, None, source)
    with pytest.raises(ValueError, match="target must have rows like"):
        add_rows(target.double(), inside, source)
    with pytest.raises(ValueError, match="target must have rows like"):
        add_rows(target.int(), inside, source.int())
    with pytest.raises(ValueError, match="is_first must have shape"):
        add_rows(target, inside, source, torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="limit is not a number"):
        add_rows(target, inside, source, limit=math.nan)
    assert not target.any()


def expected_sums(values: Tensor, order: list[int], offsets: list[int]) -> Tensor:
    out = torch.zeros(len(offsets) - 1, values.shape[1], dtype=values.dtype)
    for s in range(len(out)):
        for o in range(offsets[s], offsets[s + 1]):
            out[s] += values[order[o]]
    return out


@DTYPES
@THREADS
@pytest.mark.parametrize("sizes", [[], [0], [0, 3, 0, 0, 1, 2, 0], [5, 1] * 300, [4000, 0, 0, *[1] * 900, *[0] * 900]])
def test_sum_rows(dtype: torch.dtype, num_threads: int, sizes: list[int]) -> None:
    generator, num_values = torch.Generator().manual_seed(len(sizes)), 700
    values = random_rows(num_values, 300 if len(sizes) > 600 else 9, 3, dtype, 1)
    values[0] = -0.0
    offsets = [0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()]
    order = torch.randint(num_values, (sum(sizes) + 2,), generator=generator)
    out = torch.full((len(sizes), values.shape[1]), 7.0, dtype=dtype)
    sum_rows(values, order, torch.tensor(offsets), out, num_threads)
    expected = expected_sums(values, order.tolist(), offsets)
    assert torch.equal(out, expected)
    assert torch.equal(out.signbit(), expected.signbit())
    if offsets[-1] <= num_values:
        sum_rows(values, None, torch.tensor(offsets), out, num_threads)
        assert torch.equal(out, expected_sums(values, list(range(num_values)), offsets))
    if len(sizes) > 3:
        sum_rows(values, order, torch.tensor(offsets[2:]), out[2:], num_threads)
        assert torch.equal(out[2:], expected[2:])


def test_sum_refusals() -> None:
    values, out, order = torch.ones(3, 2), torch.zeros(2, 2), torch.tensor([0, 2, 1])
    for offsets in ([-1, 0, 3], [0, 2, 1], [0, 1, 4]):
        with pytest.raises(ValueError, match=r"offsets do not rise within 0 \.\. 3"):
            sum_rows(values, order, torch.tensor(offsets), out)
        with pytest.raises(ValueError, match=r"offsets do not rise within 0 \.\. 3"):
            sum_rows(values, None, torch.tensor(offsets), out)
    with pytest.raises(ValueError, match="values: place number 1 is 3"):
        sum_rows(values, torch.tensor([0, 3, 1]), torch.tensor([0, 1, 3]), out)
    with pytest.raises(ValueError, match="offsets must have shape"):
        sum_rows(values, order, torch.tensor([0, 3]), out)
    with pytest.raises(ValueError, match="out must have rows like"):
        sum_rows(values, order, torch.tensor([0, 1, 3]), out[:, :1])
    assert not out.any()
