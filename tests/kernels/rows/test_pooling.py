"""Tests pooling and gathering on a device against pooling in host memory. Sums of these values are exact in any order.

Fails, for example, if _Sums.backward leaves out the weights, if _are_columns does not compare offsets in the storage,
so that gradients in another order are taken for columns, or if _SideBySide.join returns no spacing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nestpipe.embedding.pooling import Occurrences
from nestpipe.embedding.pooling import pool as pool_in_host_memory
from nestpipe.kernels.rows import pooling
from nestpipe.kernels.rows.pooling import DeviceOccurrences, gather, pool, pool_joined
from nestpipe.kernels.rows.segments import make_segments, one_each
from nestpipe.store import group_by_row
from tests.kernels.bits import DTYPES

NUM_ROWS, DIM = 11, 3


@dataclass(frozen=True)
class Case:
    """Occurrences of several features, ordered by (sample, feature)."""

    index: Tensor
    """Row of each; NUM_ROWS for padding."""
    lengths: Tensor
    """[samples, features]"""
    weights: Tensor | None

    @property
    def num_features(self) -> int:
        return self.lengths.shape[1]

    def in_host_memory(self) -> list[Occurrences]:
        sizes, features = self.lengths.flatten().tolist(), []
        for f in range(self.num_features):
            index, weights = (
                None if array is None else torch.cat([array[:0], *array.split(sizes)[f :: self.num_features]])
                for array in (self.index, self.weights)
            )
            features.append(Occurrences(index, offsets_of(self.lengths[:, f]), weights))
        return features

    def on_device(self, device: torch.device) -> DeviceOccurrences:
        is_gather = self.weights is None and bool((self.lengths == 1).all())
        offsets = None if is_gather else offsets_of(self.lengths.flatten())
        return occurrences_of(self.index, offsets, self.weights, device)


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def occurrences_of(
    index: Tensor, offsets: Tensor | None, weights: Tensor | None, device: torch.device
) -> DeviceOccurrences:
    vectors = one_each(index) if offsets is None else make_segments(index, offsets)
    row_offsets, occurrences, numbers = group_by_row(index, offsets, NUM_ROWS)
    rows = make_segments(numbers, row_offsets, None if weights is None else occurrences)
    return DeviceOccurrences(vectors, rows, weights).map(lambda array: array.to(device))


def drawn(num_samples: int, kind: str = "weighted", num_features: int = 3, dtype: torch.dtype = torch.float32) -> Case:
    shape = num_samples, num_features
    lengths = torch.ones(shape, dtype=torch.int64) if kind == "one each" else torch.randint(0, 4, shape)
    index = torch.randint(0, NUM_ROWS + 1, (int(lengths.sum()),))
    return Case(index, lengths, (torch.arange(len(index)) % 5 / 4).to(dtype) if kind == "weighted" else None)


def whole_numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-8, 9, shape).to(dtype)


def trained(array: Tensor, device: torch.device | str = "cpu") -> Tensor:
    return array.to(device).clone().requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["one each", "several", "weighted"])
@pytest.mark.parametrize("num_samples", [0, 1, 60])
def test_as_in_host_memory(num_samples: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(num_samples)
    case, rows = drawn(num_samples, kind, dtype=dtype), whole_numbers(NUM_ROWS, DIM, dtype=dtype)
    host_rows, pooled_rows, joined_rows = trained(rows), trained(rows, device), trained(rows, device)
    expected = pool_in_host_memory(case.in_host_memory(), [host_rows] * 3)
    occurrences = case.on_device(device)
    pooled, joined = pool(occurrences, pooled_rows, 3), pool_joined(occurrences, joined_rows, 3)
    assert torch.equal(joined.cpu(), expected)
    assert all(map(torch.equal, (part.cpu() for part in pooled), expected.split(DIM, dim=1)))
    assert {part.untyped_storage().data_ptr() for part in pooled} == {pooled[0].untyped_storage().data_ptr()}
    gradient = whole_numbers(num_samples, 3 * DIM, dtype=dtype)
    expected.backward(gradient)
    joined.backward(gradient.to(device))
    torch.autograd.backward(pooled, [part.contiguous() for part in gradient.to(device).split(DIM, dim=1)])
    assert torch.equal(pooled_rows.grad.cpu(), host_rows.grad)
    assert torch.equal(joined_rows.grad.cpu(), host_rows.grad)


def test_one_feature(device: torch.device) -> None:
    """Fails if _SideBySide.split returns a feature's array without its tuple."""
    torch.manual_seed(1)
    case, rows = drawn(20, num_features=1), whole_numbers(NUM_ROWS, DIM)
    host_rows, device_rows = trained(rows), trained(rows, device)
    (pooled,) = pool(case.on_device(device), device_rows, 1)
    expected = pool_in_host_memory(case.in_host_memory(), [host_rows])
    assert torch.equal(pooled.cpu(), expected)
    pooled.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(device_rows.grad.cpu(), host_rows.grad)


Features = Sequence[Tensor]
Loss = Callable[[Features, Tensor], Tensor]
"""Returns a number, from features and dense, which has the shape of a feature."""


def weigh(array: Tensor) -> Tensor:
    return (array * (torch.arange(array.numel(), device=array.device).view(array.shape) % 7 - 3)).sum()


LAYOUTS: dict[str, Loss] = {
    "contiguous": lambda f, dense: sum(weigh(part) for part in f),
    "expanded": lambda f, dense: sum(part.sum() for part in f),
    "one row for all samples": lambda f, dense: sum(weigh(part.sum(0)) for part in f),
    "transposed": lambda f, dense: sum(part.t().contiguous().t().square().sum() for part in f),
    "columns": lambda f, dense: weigh(torch.stack([*f], dim=1)),
    "behind dense": lambda f, dense: weigh(torch.stack([dense, *f], dim=1)),
    "before dense": lambda f, dense: weigh(torch.stack([*f, dense], dim=1)),
    "columns of another width": lambda f, dense: weigh(torch.cat([dense[:, :2], *f], dim=1)),
    "in another order": lambda f, dense: weigh(torch.stack([f[1], f[0], f[2]], dim=1)),
    "not side by side": lambda f, dense: weigh(torch.stack([f[0], f[1], dense, f[2]], dim=1)),
    "of two arrays": lambda f, dense: (
        weigh(torch.stack([f[0], f[1]], dim=1)) + weigh(torch.stack([f[2], dense], dim=1))
    ),
    "first unused": lambda f, dense: weigh(torch.stack([dense, f[1], f[2]], dim=1)),
    "last unused": lambda f, dense: weigh(torch.stack([f[0], f[1], dense], dim=1)),
    "one used": lambda f, dense: f[1].sum(),
}


def with_samples(layouts: Sequence[str]) -> pytest.MarkDecorator:
    """Tries each layout with many samples and with few, 0 to 2 in turn; slow tests try the others."""
    cases = [
        pytest.param(layout, num_samples, marks=() if num_samples in (i % 3, 30) else pytest.mark.slow)
        for i, layout in enumerate(layouts)
        for num_samples in (0, 1, 2, 30)
    ]
    return pytest.mark.parametrize(("layout", "num_samples"), cases)


@with_samples([*LAYOUTS])
def test_gradients_of_any_layout(layout: str, num_samples: int, device: torch.device) -> None:
    """Fails if _SideBySide.join leaves out unused features instead of taking zeros for them."""
    torch.manual_seed(num_samples)
    case, rows, dense = drawn(num_samples), whole_numbers(NUM_ROWS, DIM), whole_numbers(num_samples, DIM)
    host_rows, device_rows = trained(rows), trained(rows, device)
    expected = pool_in_host_memory(case.in_host_memory(), [host_rows] * 3).split(DIM, dim=1)
    LAYOUTS[layout](expected, dense).backward()
    LAYOUTS[layout](pool(case.on_device(device), device_rows, 3), dense.to(device)).backward()
    assert torch.equal(device_rows.grad.cpu(), host_rows.grad)


JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "contiguous": lambda joined, dense: weigh(joined),
    "expanded": lambda joined, dense: joined.sum(),
    "one row for all samples": lambda joined, dense: weigh(joined.sum(0)),
    "transposed": lambda joined, dense: joined.t().contiguous().t().square().sum(),
    "columns": lambda joined, dense: weigh(torch.cat([dense, joined], dim=1)),
    "columns of another width": lambda joined, dense: weigh(torch.cat([dense[:, :2], joined], dim=1)),
    "some columns": lambda joined, dense: weigh(joined[:, 2:5]),
}


@with_samples([*JOINED])
def test_gradients_of_joined_features(layout: str, num_samples: int, device: torch.device) -> None:
    """Fails if _SideBySide.join hands on an expanded gradient as it is, whose elements all lie in one place."""
    torch.manual_seed(num_samples)
    case, rows, dense = drawn(num_samples), whole_numbers(NUM_ROWS, DIM), whole_numbers(num_samples, DIM)
    host_rows, device_rows = trained(rows), trained(rows, device)
    JOINED[layout](pool_in_host_memory(case.in_host_memory(), [host_rows] * 3), dense).backward()
    JOINED[layout](pool_joined(case.on_device(device), device_rows, 3), dense.to(device)).backward()
    assert torch.equal(device_rows.grad.cpu(), host_rows.grad)


@pytest.mark.parametrize(("layout", "spacing"), [("columns", None), ("behind dense", (3, 4)), ("before dense", (3, 4))])
def test_adjacent_columns_are_not_copied(
    layout: str, spacing: tuple[int, int] | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if _are_columns demands that features fill the rows of the wider array."""
    torch.manual_seed(2)
    case, rows, dense = drawn(30), whole_numbers(NUM_ROWS, DIM), whole_numbers(30, DIM).to(device)
    device_rows, gradients, summed = trained(rows, device), [], []
    features = pool(case.on_device(device), device_rows, 3)
    for feature in features:
        feature.register_hook(lambda gradient: gradients.append(gradient.untyped_storage().data_ptr()))
    loss = LAYOUTS[layout](features, dense)

    def record(values: Tensor, segments: object, weights: object, out: object, spacing: object) -> None:
        summed.append((values.untyped_storage().data_ptr(), spacing))

    def copies(*arguments: object, **named: object) -> Tensor:
        raise AssertionError("gradients are copied")

    monkeypatch.setattr(pooling, "sum_segments", record)
    for name in ("stack", "cat", "zeros_like"):
        monkeypatch.setattr(torch, name, copies)
    loss.backward()
    assert summed == [(gradients[0], spacing)]
    assert len(gradients) == 3


@pytest.mark.parametrize("sizes", [[7], [7, 0, 12], [0, 0]])
def test_gather(sizes: list[int], device: torch.device) -> None:
    """Fails if _OneAfterAnother.join leaves out unused features instead of taking zeros for them."""
    torch.manual_seed(3)
    index, rows = torch.randint(0, NUM_ROWS + 1, (sum(sizes),)), whole_numbers(NUM_ROWS, DIM)
    occurrences = occurrences_of(index, None, None, device)
    losses: list[Callable[[Features], Tensor]] = [
        lambda parts: sum(weigh(part) for part in parts),
        lambda parts: sum(part.sum() for part in parts),
        lambda parts: sum(part.t().contiguous().t().square().sum() for part in parts),
        lambda parts: weigh(torch.cat([part[:, :2] for part in parts])),
        lambda parts: weigh(parts[-1]),
    ]
    for loss in losses:
        host_rows, device_rows = trained(rows), trained(rows, device)
        expected = [pool_in_host_memory([Occurrences(part)], [host_rows]) for part in index.split(sizes)]
        got = gather(occurrences, device_rows, sizes)
        assert [part.tolist() for part in got] == [part.tolist() for part in expected]
        loss(expected).backward()
        loss(got).backward()
        assert torch.equal(device_rows.grad.cpu(), host_rows.grad)


def test_frozen_rows(device: torch.device) -> None:
    """Rows without segments have no gradient, and cannot be trained. Fails if _apply does not ask for them."""
    made, rows = drawn(5).on_device(device), torch.ones(NUM_ROWS, DIM, device=device)
    frozen = DeviceOccurrences(made.vectors, None, made.weights)
    assert frozen.map(lambda array: array).rows is None
    assert not any(part.requires_grad for part in pool(frozen, rows, 3))
    assert torch.equal(pool_joined(frozen, rows, 3), pool_joined(made, rows, 3))
    trained_rows, fewer_rows = trained(rows, device), trained(rows[:-1], device)
    for call in (lambda occurrences, array: pool(occurrences, array, 3), lambda *both: gather(*both, [15])):
        with pytest.raises(ValueError, match="an array of 11 rows is trained, but its occurrences were not made"):
            call(frozen, trained_rows)
        with pytest.raises(ValueError, match="an array of 10 rows is trained, but its occurrences were not made"):
            call(made, fewer_rows)
