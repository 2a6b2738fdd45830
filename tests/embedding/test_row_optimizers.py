"""The native row optimizers against their formulas in torch, on rows that lie in records.

Fails, for example, if adam takes the second moment from state + row_stride, or adagrad adds eps inside the root.
"""

import pytest
import torch

from nestpipe.embedding.optim import Adagrad, Adam, RowOptimizer, RowWiseAdagrad

DIM = 37


def adagrad(rows: torch.Tensor, state: torch.Tensor, g: torch.Tensor, step: int) -> None:
    state += g * g
    rows -= 0.1 * g / (state.sqrt() + 1e-10)


def adam(rows: torch.Tensor, state: torch.Tensor, g: torch.Tensor, step: int) -> None:
    first, second = state.split(DIM, dim=1)
    first.copy_(0.9 * first + 0.1 * g)
    second.copy_(0.999 * second + 0.001 * g * g)
    rows -= 0.01 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step) * first / (second.sqrt() + 1e-8)


@pytest.mark.parametrize(("optimizer", "formula"), [(Adagrad(0.1), adagrad), (Adam(0.01), adam)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [0, 1, 1500])
def test_formula(optimizer: RowOptimizer, formula, dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(2)
    start = torch.rand(num_rows, DIM + optimizer.state_width(DIM), dtype=dtype)
    gradients = [torch.randn(num_rows, DIM, dtype=dtype) for _ in range(3)]
    expected = start.clone()
    for step, gradient in enumerate(gradients, start=1):
        formula(expected[:, :DIM], expected[:, DIM:], gradient, step)
    results = []
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            records = start.clone()
            for step, gradient in enumerate(gradients, start=1):
                optimizer.apply(records[:, :DIM], records[:, DIM:], gradient, step)
            results.append(records)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(results[0], expected)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta2", [0.999, 0.999999])
def test_adam_adds_one_minus_beta_to_one_rounding(beta2: float, dtype: torch.dtype) -> None:
    """Fails if Decay of the native library subtracts beta from 1 in the rows' dtype: by 1e-5 and 1.3e-2 in float32."""
    rows, state = torch.zeros(1, DIM, dtype=dtype), torch.zeros(1, 2 * DIM, dtype=dtype)
    Adam(0.01, (1 - 1e-6, beta2)).apply(rows, state, torch.ones(1, DIM, dtype=dtype), 1)
    expected = torch.tensor([1 - (1 - 1e-6)] * DIM + [1 - beta2] * DIM, dtype=dtype)
    assert torch.equal(state[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [Adagrad, RowWiseAdagrad, Adam])
def test_without_eps_a_zero_divisor_changes_no_row(kind: type[RowOptimizer], dtype: torch.dtype) -> None:
    """For gradients of zero, and for gradients whose squares are zero in the dtype.

    Fails if with_divisor of the native library, or masked_fill_ of RowWiseAdagrad, lets zero through.
    """
    optimizer = kind(0.1, eps=0.0)
    torch.manual_seed(3)
    rows, gradient = torch.randn(4, DIM, dtype=dtype), torch.zeros(4, DIM, dtype=dtype)
    gradient[1], gradient[2, 5], gradient[3] = torch.finfo(dtype).tiny, 1.5, 2.0
    before, state = rows.clone(), torch.zeros(4, optimizer.state_width(DIM), dtype=dtype)
    for step in (1, 2):
        optimizer.apply(rows, state, gradient, step)
    assert torch.isfinite(rows).all()
    in_column_5 = [column == 5 for column in range(DIM)]
    assert (rows != before).tolist() == [[False] * DIM, [False] * DIM, in_column_5, [True] * DIM]


def test_other_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="one dtype"):
        Adagrad(0.1).apply(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64), 1)
