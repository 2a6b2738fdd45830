"""Pooling against torch's embedding_bag, its gradients against a loop in order of occurrence.

Fails, for example, if pool_backward leaves out the weights, or starts a thread's columns at 0; or if sum_rows_of leaves
out the columns behind the last 8, or in_avx2 is compiled for processors with fused multiply-adds.
"""

import pytest
import torch
import torch.nn.functional as F

from nestpipe.embedding.pooling import Occurrences, pool
from nestpipe.embedding.recycler import LARGE_BYTES


def drawn(num_samples: int, num_rows: int, one_each: bool, dtype: torch.dtype) -> Occurrences:
    lengths = torch.ones(num_samples, dtype=torch.int64) if one_each else torch.randint(0, 4, (num_samples,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_keys = int(offsets[-1])
    weights = None if one_each else torch.rand(num_keys, dtype=dtype)
    return Occurrences(torch.randint(0, num_rows + 1, (num_keys,)), None if one_each else offsets, weights)


def in_order(occurrences: Occurrences, gradient: torch.Tensor, num_rows: int) -> torch.Tensor:
    sums = torch.zeros(num_rows + 1, gradient.shape[1], dtype=gradient.dtype)
    offsets = torch.arange(len(gradient) + 1) if occurrences.offsets is None else occurrences.offsets
    for sample in range(len(gradient)):
        for i in range(int(offsets[sample]), int(offsets[sample + 1])):
            weight = 1.0 if occurrences.weights is None else occurrences.weights[i]
            sums[occurrences.index[i]] += weight * gradient[sample]
    return sums[:num_rows]


def sums_in_order(occurrences: Occurrences, rows: torch.Tensor) -> torch.Tensor:
    num_samples = occurrences.num_samples
    sums = torch.zeros(num_samples, rows.shape[1], dtype=rows.dtype)
    offsets = torch.arange(num_samples + 1) if occurrences.offsets is None else occurrences.offsets
    for sample in range(num_samples):
        for i in range(int(offsets[sample]), int(offsets[sample + 1])):
            if occurrences.index[i] < len(rows):
                weight = 1.0 if occurrences.weights is None else occurrences.weights[i]
                sums[sample] += weight * rows[occurrences.index[i]]
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("one_each", [True, False])
@pytest.mark.parametrize("num_samples", [0, 1, 300])
def test_against_torch(dtype: torch.dtype, one_each: bool, num_samples: int) -> None:
    """Two features of different dims side by side. Both ways agree with a loop to the bit, forward with torch up to
    rounding."""
    torch.manual_seed(0)
    features = [drawn(num_samples, num_rows, one_each, dtype) for num_rows in (20, 7)]
    arrays = [torch.randn(20, 45, dtype=dtype), torch.randn(7, 5, dtype=dtype)]
    gradient = torch.randn(num_samples, 50, dtype=dtype)
    expected = []
    for occurrences, rows in zip(features, arrays, strict=True):
        padded = torch.cat([rows, torch.zeros(1, rows.shape[1], dtype=dtype)])
        offsets = torch.arange(num_samples + 1) if occurrences.offsets is None else occurrences.offsets
        options = {"mode": "sum", "include_last_offset": True, "per_sample_weights": occurrences.weights}
        expected.append(F.embedding_bag(occurrences.index, padded, offsets, **options))
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            trained = [rows.clone().requires_grad_() for rows in arrays]
            pooled = pool(features, trained)
            torch.testing.assert_close(pooled, torch.cat(expected, dim=1))
            for occurrences, rows, columns in zip(features, arrays, pooled.split([45, 5], dim=1), strict=True):
                assert torch.equal(columns, sums_in_order(occurrences, rows))
            pooled.backward(gradient)
            for occurrences, rows, columns in zip(features, trained, gradient.split([45, 5], dim=1), strict=True):
                assert torch.equal(rows.grad, in_order(occurrences, columns, len(rows)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("make", [lambda p: p.sum(), lambda p: p.t().contiguous().t().square().sum()])
def test_gradients_of_any_layout(make) -> None:
    """The gradient is expanded, with strides of 0, or transposed."""
    index = torch.tensor([0, 2, 2, 3])
    rows, other = (torch.arange(6.0).view(3, 2).requires_grad_() for _ in range(2))
    make(pool([Occurrences(index)], [rows])).backward()
    padded = torch.cat([other, torch.zeros(1, 2)])
    make(F.embedding(index, padded)).backward()
    assert torch.equal(rows.grad, other.grad)


def test_large_output_may_be_changed_in_place() -> None:
    rows = torch.tensor([[1.0], [-1.0]]).expand(2, 64).clone().requires_grad_()
    index = torch.arange(LARGE_BYTES // 256) % 2
    pool([Occurrences(index)], [rows]).relu_().sum().backward()
    assert rows.grad[:, 0].tolist() == [len(index) / 2, 0]


def test_frozen_and_trained_rows_together() -> None:
    frozen, trained = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
    pool([Occurrences(torch.tensor([0, 1]))] * 2, [frozen, trained]).sum().backward()
    assert frozen.grad is None
    assert torch.equal(trained.grad, torch.ones(2, 3))


def test_index_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="index"):
        pool([Occurrences(torch.tensor([0, 4]))], [torch.zeros(3, 2)])
