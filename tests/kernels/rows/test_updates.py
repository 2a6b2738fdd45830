"""Row optimizers against their formulas in numpy, element by element and in the same order, to the bit.

Fails, for example, if adam takes the second moment from the first one's columns, if it takes beta1 off 1 after it is
rounded to the rows' dtype, or if LANES is 512 in the kernel.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import nestpipe
from nestpipe.kernels.rows import updates
from tests.kernels.bits import DTYPES, dims_and_dtypes, same_bits

LR, EPS, BETA1, BETA2 = 0.1, 1e-3, 0.9, 0.999
STATE_WIDTH: dict[str, Callable[[int], int]] = {
    "sgd": lambda dim: 0,
    "adagrad": lambda dim: dim,
    "rowwise_adagrad": lambda dim: 1,
    "adam": lambda dim: 2 * dim,
}
NUMBERS = {"sgd": (LR,), "adagrad": (LR, EPS), "rowwise_adagrad": (LR, EPS), "adam": (BETA1, BETA2, LR, EPS)}


def neighbours(values: np.ndarray) -> np.ndarray:
    while values.shape[1] > 1:
        values = values[:, 0::2] + values[:, 1::2]
    return values


def mean_square(g: np.ndarray) -> np.ndarray:
    """Of every 1024th column, then of neighbours."""
    lanes = min(1024, 2 ** int(np.ceil(np.log2(g.shape[1]))))
    sums = np.zeros((len(g), lanes), g.dtype)
    for column in range(g.shape[1]):
        sums[:, column % lanes] += g[:, column] * g[:, column]
    return neighbours(sums) / g.dtype.type(g.shape[1])


def formula(name: str, records: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The records after one step."""
    dim, number = g.shape[1], g.dtype.type
    rows, state, new = records[:, :dim], records[:, dim:], records.copy()
    lr, eps, beta1, beta2 = map(number, (LR, EPS, BETA1, BETA2))
    if name == "sgd":
        new[:, :dim] = rows - lr * g
    elif name == "adam":
        first = beta1 * state[:, :dim] + number(1 - BETA1) * g
        second = beta2 * state[:, dim:] + number(1 - BETA2) * (g * g)
        new[:, dim:] = np.concatenate([first, second], axis=1)
        new[:, :dim] = rows - lr * first / (np.sqrt(second) + eps)
    else:
        new[:, dim:] = state + (g * g if name == "adagrad" else mean_square(g))
        new[:, :dim] = rows - lr * g / (np.sqrt(new[:, dim:]) + eps)
    return new


def drawn(name: str, num_rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(dim)
    return torch.rand(num_rows, dim + STATE_WIDTH[name](dim), dtype=dtype), torch.randn(num_rows, dim, dtype=dtype)


def update(name: str, records: Tensor, g: Tensor, is_masked: Tensor | None = None) -> None:
    dim = g.shape[1]
    getattr(updates, name)(records[:, :dim], records[:, dim:], g, *NUMBERS[name], is_masked=is_masked)


def close(results: Tensor, expected: Tensor) -> None:
    """Up to the last bits: torch's square root may have others on a CPU."""
    precision = 8 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(results.cpu(), expected, rtol=precision, atol=precision)


@dims_and_dtypes(1, 3, 64, 100, 512, 513, 2500)
@pytest.mark.parametrize("name", STATE_WIDTH)
def test_formula(name: str, dim: int, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    records, g = drawn(name, 37, dim, dtype)
    expected = torch.from_numpy(formula(name, records.numpy(), g.numpy()))
    in_a_wider_array = torch.randn(37, records.shape[1] + 3, dtype=dtype).to(device)
    there, of_reference = in_a_wider_array[:, 1:-2], records.to(device)
    beside = in_a_wider_array[:, [0, -2, -1]]
    there.copy_(records)
    update(name, there, g.to(device))
    assert same_bits(there, expected)
    assert same_bits(in_a_wider_array[:, [0, -2, -1]], beside)
    monkeypatch.setattr("nestpipe.kernels.rows.updates.runs_triton", lambda *arrays: False)
    update(name, of_reference, g.to(device))
    close(of_reference, expected)


@pytest.mark.parametrize("name", STATE_WIDTH)
def test_each_alone_and_again(name: str, device: torch.device) -> None:
    """Also where addresses permit narrow loads only. Fails if the mean is divided by num_rows."""
    records, g = drawn(name, 200, 100, torch.float32)
    together = [records.clone().to(device) for _ in range(3)]
    for of in together:
        update(name, of, g.to(device))
        assert same_bits(of, together[0])
    some = torch.tensor([0, 3, 77, 199])
    unaligned = torch.empty(4, records.shape[1] + 1, device=device)[:, 1:]
    unaligned.copy_(records[some])
    update(name, unaligned, g[some].to(device))
    assert same_bits(unaligned, together[0][some.to(device)])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("name", STATE_WIDTH)
def test_masked_step_changes_nothing(name: str, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    """Not even with a gradient that is not finite. Fails if if_applied returns `inside`."""
    records, g = drawn(name, 9, 5, torch.float32)
    expected = torch.from_numpy(formula(name, records.numpy(), g.numpy()))
    for with_triton in (True, False):
        masked, applied = records.clone().to(device), records.clone().to(device)
        if not with_triton:
            monkeypatch.setattr("nestpipe.kernels.rows.updates.runs_triton", lambda *arrays: False)
        update(name, masked, (g / 0).to(device), torch.tensor(True, dtype=dtype, device=device))
        update(name, applied, g.to(device), torch.tensor([0], dtype=dtype, device=device))
        assert same_bits(masked, records)
        close(applied, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "adam"])
def test_zero_divisor_changes_no_row(name: str, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    """With eps = 0 and no state: gradients of zero, and gradients whose squares are zero in the dtype.

    Fails if `divisor` of the kernels, or `_divisor` of the reference, returns the total as it is.
    """
    rows, g = torch.randn(4, 8, dtype=dtype), torch.zeros(4, 8, dtype=dtype)
    g[1], g[2, 3], g[3] = torch.finfo(dtype).tiny, 1.5, 2.0
    records = torch.cat([rows, torch.zeros(4, STATE_WIDTH[name](8), dtype=dtype)], dim=1)
    monkeypatch.setitem(NUMBERS, name, (*NUMBERS[name][:-1], 0.0))
    for with_triton in (True, False):
        if not with_triton:
            monkeypatch.setattr("nestpipe.kernels.rows.updates.runs_triton", lambda *arrays: False)
        there = records.clone().to(device)
        update(name, there, g.to(device))
        is_changed = (there[:, :8].cpu() != rows).tolist()
        assert torch.isfinite(there).all()
        assert is_changed == [[False] * 8, [False] * 8, [column == 3 for column in range(8)], [True] * 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_same_bits_as_the_native_library(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Fails if one of them, alone, takes 1 - beta in the rows' dtype."""
    records, g = drawn(name, 50, 33, dtype)
    there = records.to(device)
    optimizer = (
        nestpipe.optim.Adagrad(LR, eps=EPS) if name == "adagrad" else nestpipe.optim.Adam(LR, (BETA1, BETA2), EPS)
    )
    masked = torch.tensor(False, device=device)
    for step in (1, 2, 3):
        optimizer.apply(records[:, :33], records[:, 33:], g, step)
        optimizer.apply(there[:, :33], there[:, 33:], g.to(device), step, masked)
    assert same_bits(there, records)


@pytest.mark.parametrize("name", STATE_WIDTH)
def test_no_rows(name: str, device: torch.device) -> None:
    records, g = drawn(name, 0, 5, torch.float32)
    update(name, records.to(device), g.to(device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_row_optimizers(dtype: torch.dtype, device: torch.device) -> None:
    """Which work in host memory, with an order of their own."""
    optimizers = {
        "sgd": nestpipe.optim.SGD(LR),
        "adagrad": nestpipe.optim.Adagrad(LR, eps=EPS),
        "rowwise_adagrad": nestpipe.optim.RowWiseAdagrad(LR, eps=EPS),
        "adam": nestpipe.optim.Adam(LR, (BETA1, BETA2), EPS),
    }
    for name, optimizer in optimizers.items():
        records, g = drawn(name, 50, 20, dtype)
        there = records.to(device)
        for step in (1, 2):
            optimizer.apply(records[:, :20], records[:, 20:], g, step)
            step_size = LR * (1 - BETA2**step) ** 0.5 / (1 - BETA1**step)
            numbers = (BETA1, BETA2, step_size, EPS) if name == "adam" else NUMBERS[name]
            getattr(updates, name)(there[:, :20], there[:, 20:], g.to(device), *numbers)
        torch.testing.assert_close(there.cpu(), records)


def test_what_is_refused(device: torch.device) -> None:
    rows, state = torch.zeros(3, 4, device=device), torch.zeros(3, 4, device=device)
    for arguments, message in (
        ((rows, state[:, :2], rows.clone(), LR, EPS), r"state has shape \[3, 2\]"),
        ((rows, state, rows.double(), LR, EPS), "float32"),
        ((rows, state, rows[:2], LR, EPS), "gradient"),
        ((rows, state, rows.clone(), LR, EPS, torch.zeros(3, device=device)), "is_masked"),
    ):
        with pytest.raises(ValueError, match=message):
            updates.adagrad(*arguments)
