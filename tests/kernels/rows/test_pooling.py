"""Tests pooling on a device against pooling in host memory.

Fails, for example, if backward leaves out the weights, or takes the columns of another feature.
"""

import pytest
import torch

from nestpipe.embedding.pooling import Occurrences
from nestpipe.embedding.pooling import pool as pool_in_host_memory
from nestpipe.kernels.rows.pooling import make_occurrences, pool
from tests.kernels.bits import DTYPES


def drawn(num_samples: int, num_rows: int, one_each: bool, dtype: torch.dtype) -> Occurrences:
    lengths = torch.ones(num_samples, dtype=torch.int64) if one_each else torch.randint(0, 4, (num_samples,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    index = torch.randint(0, num_rows + 1, (int(offsets[-1]),))
    return (
        Occurrences(index, None, None) if one_each else Occurrences(index, offsets, torch.rand(len(index), dtype=dtype))
    )


def trained(arrays: list[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    return [array.to(device).clone().requires_grad_() for array in arrays]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one_each", [True, False])
@pytest.mark.parametrize("num_samples", [0, 1, 200])
def test_as_in_host_memory(num_samples: int, one_each: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Pools two features of different dims. Bits are equal, since no row has more occurrences than a piece."""
    torch.manual_seed(0)
    arrays = [torch.randn(20, 33, dtype=dtype), torch.randn(17, 5, dtype=dtype)]
    features = [drawn(num_samples, len(array), one_each, dtype) for array in arrays]
    gradient = torch.randn(num_samples, 38, dtype=dtype)
    expected_arrays = trained(arrays, "cpu")
    expected = pool_in_host_memory(features, expected_arrays)
    expected.backward(gradient)
    on_device = [
        make_occurrences(feature.index, feature.offsets, feature.weights, len(array)).to(device)
        for feature, array in zip(features, arrays, strict=True)
    ]
    arrays = trained(arrays, device)
    pooled = pool(on_device, arrays)
    assert torch.equal(pooled.cpu(), expected)
    pooled.backward(gradient.to(device))
    for array, other in zip(arrays, expected_arrays, strict=True):
        assert torch.equal(array.grad.cpu(), other.grad)


@pytest.mark.parametrize("make", [lambda p: p.sum(), lambda p: p.t().contiguous().t().square().sum()])
def test_gradients_of_any_layout(make, device: torch.device) -> None:
    index = torch.tensor([0, 2, 2, 3])
    (array,), (other,) = (trained([torch.arange(6.0).view(3, 2)], where) for where in (device, "cpu"))
    make(pool([make_occurrences(index, None, None, 3).to(device)], [array])).backward()
    make(pool_in_host_memory([Occurrences(index)], [other])).backward()
    assert torch.equal(array.grad.cpu(), other.grad)


def test_frozen_rows_next_to_trained_ones(device: torch.device) -> None:
    index, frozen, trained = torch.tensor([0, 1]), torch.ones(2, 3, device=device), torch.ones(2, 3, device=device)
    trained.requires_grad_()
    made = [make_occurrences(index, None, None, 2, is_trained).to(device) for is_trained in (False, True)]
    pool(made, [frozen, trained]).sum().backward()
    assert frozen.grad is None
    assert torch.equal(trained.grad.cpu(), torch.ones(2, 3))
    with pytest.raises(ValueError, match="an array of 2 rows is trained"):
        pool(made[:1], [trained])


def test_refusals(device: torch.device) -> None:
    with pytest.raises(ValueError, match="outside 0"):
        make_occurrences(torch.tensor([0, 4]), None, None, 3, is_trained=False)
    with pytest.raises(ValueError, match="weights"):
        make_occurrences(torch.tensor([0, 1]), None, torch.ones(3), 3)
    with pytest.raises(ValueError, match="same dtype"):
        pool([], [])
