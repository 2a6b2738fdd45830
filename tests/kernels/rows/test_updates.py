"""Tests row optimizers against their formulas in numpy, element by element and in the same order, to the bit.

Fails, for example, if adam takes the second moment from the first one's columns, if it subtracts beta1 from 1 after
rounding it to the rows' dtype, or if LANES is 512 in the kernel.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nestpipe.embedding import optim
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
    """Sums the squares of every 1024th column, then of neighbours."""
    lanes = min(1024, 2 ** int(np.ceil(np.log2(g.shape[1]))))
    sums = np.zeros((len(g), lanes), g.dtype)
    for column in range(g.shape[1]):
        sums[:, column % lanes] += g[:, column] * g[:, column]
    return neighbours(sums) / g.dtype.type(g.shape[1])


def formula(name: str, records: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Returns the records after one step."""
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


def update(name: str, records: Tensor, g: Tensor, is_masked: Tensor | None = None, slots: Tensor | None = None) -> None:
    dim = g.shape[1]
    getattr(updates, name)(records[:, :dim], records[:, dim:], g, *NUMBERS[name], is_masked=is_masked, slots=slots)


def close(results: Tensor, expected: Tensor) -> None:
    """Compares up to the last bits, in which torch's square root may differ on a CPU."""
    precision = 8 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(results.cpu(), expected, rtol=precision, atol=precision)


@dims_and_dtypes(1, 3, 64, 100, 512, 513, 2500)
@pytest.mark.parametrize("name", STATE_WIDTH)
def test_formula(name: str, dim: int, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    records, g = drawn(name, 37, dim, dtype)
    expected = torch.from_numpy(formula(name, records.numpy(), g.numpy()))
    in_a_wider_array = torch.randn(37, records.shape[1] + 3, dtype=dtype).to(device)
    columns, by_reference = in_a_wider_array[:, 1:-2], records.to(device)
    other_columns = in_a_wider_array[:, [0, -2, -1]]
    columns.copy_(records)
    update(name, columns, g.to(device))
    assert same_bits(columns, expected)
    assert same_bits(in_a_wider_array[:, [0, -2, -1]], other_columns)
    monkeypatch.setattr("nestpipe.kernels.rows.updates.runs_triton", lambda *arrays: False)
    update(name, by_reference, g.to(device))
    close(by_reference, expected)


@pytest.mark.parametrize("name", STATE_WIDTH)
def test_each_alone_and_again(name: str, device: torch.device) -> None:
    """Rows give the same bits alone and unaligned. Fails if the mean is divided by num_rows."""
    records, g = drawn(name, 200, 100, torch.float32)
    together = [records.clone().to(device) for _ in range(3)]
    for copy in together:
        update(name, copy, g.to(device))
        assert same_bits(copy, together[0])
    some = torch.tensor([0, 3, 77, 199])
    unaligned = torch.empty(4, records.shape[1] + 1, device=device)[:, 1:]
    unaligned.copy_(records[some])
    update(name, unaligned, g[some].to(device))
    assert same_bits(unaligned, together[0][some.to(device)])


@dims_and_dtypes(3, 130)
@pytest.mark.parametrize("name", STATE_WIDTH)
def test_slots(name: str, dim: int, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    """Slots in any order get the bits of an update of dense arrays; a masked step and other slots change nothing.

    Fails if load_gradient reads the gradient of tile_slots, if rowwise_adagrad_kernel has the state of numbers, or if
    _assign of the reference writes to the first rows.
    """
    records, g = (array.to(device) for array in drawn(name, 40, dim, dtype))
    slots, g = torch.randperm(40)[:21].to(device), g[:21]
    masked = torch.tensor(True, device=device)
    for with_triton in (True, False):
        if not with_triton:
            monkeypatch.setattr("nestpipe.kernels.rows.updates.runs_triton", lambda *arrays: False)
        dense, in_slots = records[slots], records.clone()
        update(name, dense, g)
        update(name, in_slots, g / 0, masked, slots)
        update(name, in_slots, g, ~masked, slots)
        assert same_bits(in_slots, records.index_copy(0, slots, dense))


@pytest.mark.parametrize("name", STATE_WIDTH)
def test_slots_in_more_than_2_to_the_31_elements(name: str, accelerator: torch.device) -> None:
    """Fails if places_of returns int32. It needs an accelerator: the interpreter would touch all of the memory."""
    records, g = (array.to(accelerator) for array in drawn(name, 100, 16, torch.float32))
    large = torch.empty(2**31 // records.shape[1] + 100, records.shape[1], device=accelerator)
    slots = len(large) - 100 + torch.randperm(100).to(accelerator)
    large[slots] = records
    update(name, records, g)
    update(name, large, g, slots=slots)
    assert same_bits(large[slots], records)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("name", STATE_WIDTH)
def test_masked_step_changes_nothing(name: str, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    """The gradient of the masked step is not finite. Fails if if_applied returns `inside`."""
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
    """Tries eps = 0 and zero state with gradients of zero, and with gradients whose squares are zero in the dtype.

    Fails if `divisor` of the kernels, or `_divisor` of the reference, returns the total unchanged.
    """
    rows, g = torch.randn(4, 8, dtype=dtype), torch.zeros(4, 8, dtype=dtype)
    g[1], g[2, 3], g[3] = torch.finfo(dtype).tiny, 1.5, 2.0
    records = torch.cat([rows, torch.zeros(4, STATE_WIDTH[name](8), dtype=dtype)], dim=1)
    monkeypatch.setitem(NUMBERS, name, (*NUMBERS[name][:-1], 0.0))
    for with_triton in (True, False):
        if not with_triton:
            monkeypatch.setattr("nestpipe.kernels.rows.updates.runs_triton", lambda *arrays: False)
        updated = records.clone().to(device)
        update(name, updated, g.to(device))
        is_changed = (updated[:, :8].cpu() != rows).tolist()
        assert torch.isfinite(updated).all()
        assert is_changed == [[False] * 8, [False] * 8, [column == 3 for column in range(8)], [True] * 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_same_bits_as_the_native_library(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Fails if only one of them computes 1 - beta in the rows' dtype."""
    records, g = drawn(name, 50, 33, dtype)
    on_device = records.to(device)
    optimizer = optim.Adagrad(LR, eps=EPS) if name == "adagrad" else optim.Adam(LR, (BETA1, BETA2), EPS)
    masked = torch.tensor(False, device=device)
    for step in (1, 2, 3):
        optimizer.apply(records[:, :33], records[:, 33:], g, step)
        optimizer.apply(on_device[:, :33], on_device[:, 33:], g.to(device), step, masked)
    assert same_bits(on_device, records)


@pytest.mark.parametrize("name", STATE_WIDTH)
def test_no_rows(name: str, device: torch.device) -> None:
    records, g = (array.to(device) for array in drawn(name, 3, 5, torch.float32))
    update(name, records[:0], g[:0])
    before = records.clone()
    update(name, records, g[:0], slots=torch.empty(0, dtype=torch.int64, device=device))
    assert same_bits(records, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_close_to_the_row_optimizers(dtype: torch.dtype, device: torch.device) -> None:
    """The row optimizers in host memory have another order of sums, so results are close."""
    optimizers = {
        "sgd": optim.SGD(LR),
        "adagrad": optim.Adagrad(LR, eps=EPS),
        "rowwise_adagrad": optim.RowWiseAdagrad(LR, eps=EPS),
        "adam": optim.Adam(LR, (BETA1, BETA2), EPS),
    }
    for name, optimizer in optimizers.items():
        records, g = drawn(name, 50, 20, dtype)
        on_device = records.to(device)
        for step in (1, 2):
            optimizer.apply(records[:, :20], records[:, 20:], g, step)
            step_size = LR * (1 - BETA2**step) ** 0.5 / (1 - BETA1**step)
            numbers = (BETA1, BETA2, step_size, EPS) if name == "adam" else NUMBERS[name]
            getattr(updates, name)(on_device[:, :20], on_device[:, 20:], g.to(device), *numbers)
        torch.testing.assert_close(on_device.cpu(), records)


def test_refusals(device: torch.device) -> None:
    rows, state = torch.zeros(3, 4, device=device), torch.zeros(3, 4, device=device)
    slots = torch.tensor([2, 0], device=device)
    for arguments, message in (
        ((rows, state[:, :2], rows.clone(), LR, EPS), r"state has shape \[3, 2\]"),
        ((rows, state, rows.double(), LR, EPS), "float32"),
        ((rows, state, rows[:2], LR, EPS), "gradient"),
        ((rows, state, rows.clone(), LR, EPS, torch.zeros(3, device=device)), "is_masked"),
        ((rows, state, rows[:2], LR, EPS, None, slots.int()), "slots is torch.int32"),
        ((rows, state, rows[:1], LR, EPS, None, slots), r"slots is torch.int64 of shape \[2\]"),
        ((rows, state, rows[:2, :3], LR, EPS, None, slots), "gradient"),
        ((rows[:1], state[:1], rows[:2], LR, EPS, None, slots), "slots are distinct"),
    ):
        with pytest.raises(ValueError, match=message):
            updates.adagrad(*arguments)
