"""The native row optimizers against their formulas in torch, on rows that lie in records.

Fails, for example, if adam takes the second moment from state + row_stride, or `divisor` adds eps inside the root.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from nestpipe.embedding.optim import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad

DIM = 37


def adagrad(rows: torch.Tensor, state: torch.Tensor, g: torch.Tensor, step: int) -> None:
    state += g * g
    rows -= 0.1 * g / (state.sqrt() + 1e-10)


def adam(rows: torch.Tensor, state: torch.Tensor, g: torch.Tensor, step: int) -> None:
    first, second = state.split(DIM, dim=1)
    first.copy_(0.9 * first + 0.1 * g)
    second.copy_(0.999 * second + 0.001 * g * g)
    rows -= 0.01 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step) * first / (second.sqrt() + 1e-8)


def padded_squares(g: Tensor) -> Tensor:
    """Returns the squares of each row in lines of 16: [n, lines, 16]."""
    return torch.nn.functional.pad(g * g, (0, -g.shape[1] % 16)).view(len(g), -1, 16)


def exact_rowwise_adagrad(rows: Tensor, state: Tensor, g: Tensor, eps: float) -> None:
    """Adds the squares of a row in the order that nestpipe.h documents."""
    sums = padded_squares(g)[:, 0] * 0
    for line in padded_squares(g).unbind(1):
        sums = sums + line
    for half in (8, 4, 2, 1):
        sums = sums[:, :half] + sums[:, half : 2 * half]
    state += sums / g.shape[1]
    roots = torch.from_numpy(np.sqrt(state.numpy()))  # those of torch are not always the nearest numbers
    rate = torch.tensor(0.1, dtype=g.dtype) / (roots + torch.tensor(eps, dtype=g.dtype))
    rows -= rate * g


def exact_sgd(rows: Tensor, state: Tensor, g: Tensor, eps: float) -> None:
    rows.sub_(g, alpha=0.1)


@pytest.mark.parametrize("dim", [1, 15, 16, 64, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("optimizer", "formula"), [(SGD(0.1), exact_sgd), (RowWiseAdagrad(0.1, eps=1e-6), exact_rowwise_adagrad)]
)
def test_same_bits_as_torch(optimizer: RowOptimizer, formula, dtype: torch.dtype, dim: int) -> None:
    """On rows with gaps. Fails if `subtract` of the native library rounds the product, or if sum_of_squares adds up 8
    sums instead of 16."""
    torch.manual_seed(5)
    records = torch.rand(300, dim + 3, dtype=dtype)
    expected = records.clone()
    for step in (1, 2, 3):
        gradient = torch.randn(300, dim, dtype=dtype)
        optimizer.apply(records[:, :dim], records[:, dim : dim + optimizer.state_width(dim)], gradient, step)
        formula(expected[:, :dim], expected[:, dim : dim + optimizer.state_width(dim)], gradient, 1e-6)
    assert torch.equal(records, expected)


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

    Fails if `divisor` of the native library lets zero through.
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


@pytest.mark.parametrize("kind", [SGD, RowWiseAdagrad])
def test_derived_optimizers_update_device_memory(kind: type[RowOptimizer]) -> None:
    """By the `update` of their base class. Fails if it hands rows of a device to the native library."""
    optimizer = type("Derived", (kind,), {"update": lambda self, *arguments: kind.update(self, *arguments)})(0.1)
    rows, state, gradient = (torch.zeros(2, width, device="meta") for width in (3, optimizer.state_width(3), 3))
    optimizer.apply(rows, state, gradient, 1, is_masked=torch.tensor(False, device="meta"))


def test_other_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="one dtype"):
        Adagrad(0.1).apply(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64), 1)


def mask_for(is_on_device: bool) -> Tensor | None:
    """Returns the mask with which `apply` calls update_on_device, or the None with which it calls update."""
    return torch.tensor(False) if is_on_device else None


IN_SLOTS = [
    (optimizer, is_on_device)
    for optimizer in (SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.01))
    for is_on_device in (False, True)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("optimizer", "is_on_device"), IN_SLOTS)
def test_slots(optimizer: RowOptimizer, is_on_device: bool, dtype: torch.dtype) -> None:
    """Slots in any order get the bits of an update of dense arrays; other slots do not change.

    Fails if update_slot of the native library takes the state at i, or an update_on_device leaves out its slots.
    """
    torch.manual_seed(4)
    records = torch.rand(900, DIM + optimizer.state_width(DIM), dtype=dtype)
    slots, gradient = torch.randperm(900)[:700], torch.randn(700, DIM, dtype=dtype)
    dense, is_masked = records[slots], mask_for(is_on_device)
    expected = records.clone()
    for step in (1, 2):
        optimizer.apply(dense[:, :DIM], dense[:, DIM:], gradient, step, is_masked)
        optimizer.apply(records[:, :DIM], records[:, DIM:], gradient, step, is_masked, slots)
    assert torch.equal(records, expected.index_copy_(0, slots, dense))


@pytest.mark.parametrize("kind", [Adagrad, Adam])
def test_refused_slots_change_nothing(kind: type[RowOptimizer]) -> None:
    """Fails if check_update of the native library does not check slots, or _in_one_pass their number."""
    optimizer = kind(0.1)
    records, gradient = torch.ones(3, 4 + optimizer.state_width(4)), torch.ones(2, 4)
    for slots, message in (
        (torch.tensor([0, 3]), r"slots\[1\] is 3, outside of an array of 3"),
        (torch.tensor([0, -1]), r"slots\[1\] is -1"),
        (torch.tensor([0, 1, 2]), r"slots is torch.int64 of shape \[3\]"),
        (torch.tensor([0, 1], dtype=torch.int32), "slots is torch.int32"),
        (None, r"gradient has shape \[2, 4\], must have \[3, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.apply(records[:, :4], records[:, 4:], gradient, 1, slots=slots)
    assert records.unique().tolist() == [1]


def test_built_in_optimizers_take_slots() -> None:
    """Fails if takes_slots or native_for ignores weight decay."""
    for kind in (SGD, Adagrad, RowWiseAdagrad, Adam):
        for weight_decay in (0.0, 0.1):
            optimizer = kind(0.1, weight_decay=weight_decay)
            assert optimizer.takes_slots(is_on_device=False) == (weight_decay == 0.0)
            assert optimizer.takes_slots(is_on_device=True) == (weight_decay == 0.0)
            assert (optimizer.native_for(1) is not None) == (weight_decay == 0.0)


calls: list[tuple[str, int, Tensor | None]] = []
"""Method, number of rows and slots of each call of the methods below."""


def dense_update(self, rows, state, gradient, step, lr) -> None:
    calls.append(("update", len(rows), None))


def update(self, rows, state, gradient, step, lr, slots=None) -> None:
    calls.append(("update", len(rows), slots))


def dense_update_on_device(self, rows, state, gradient, step, lr, is_masked) -> None:
    calls.append(("update_on_device", len(rows), None))


def update_on_device(self, rows, state, gradient, step, lr, is_masked, slots=None) -> None:
    calls.append(("update_on_device", len(rows), slots))


def dense_apply(self, rows, state, gradient, step, is_masked=None) -> None:
    RowOptimizer.apply(self, rows, state, gradient, step, is_masked)


METHODS = {
    "update": ({"update": dense_update}, False, False),
    "update with slots": ({"update": update}, True, False),
    "update_on_device": ({"update_on_device": dense_update_on_device}, None, False),
    "update_on_device with slots": ({"update_on_device": update_on_device}, None, True),
    "both": ({"update": dense_update, "update_on_device": dense_update_on_device}, False, False),
    "both with slots": ({"update": update, "update_on_device": update_on_device}, True, True),
    "apply": ({"apply": dense_apply}, False, False),
}
"""By what a derived class overrides: its methods, and whether it takes slots in host memory and in device memory. None
stands for what the base class does."""


@pytest.mark.parametrize("overridden", METHODS)
@pytest.mark.parametrize("base", [RowOptimizer, Adagrad, Adam])
def test_derived_optimizers_take_slots(base: type[RowOptimizer], overridden: str) -> None:
    """An optimizer gets slots if the method that `apply` calls has a parameter for them; others refuse them.

    Fails if takes_slots does not ask _overrides_update, or if apply does not ask takes_slots.
    """
    methods, *takes_slots = METHODS[overridden]
    if takes_slots[0] is None:
        takes_slots[0] = base is not RowOptimizer
    optimizer = type("Derived", (base,), methods)(0.1)
    records, gradient, slots = torch.ones(5, 4 + optimizer.state_width(4)), torch.ones(2, 4), torch.tensor([3, 1])
    for is_on_device, name in enumerate(["update", "update_on_device"]):
        arguments = records[:, :4], records[:, 4:], gradient, 1, mask_for(bool(is_on_device))
        calls.clear()
        assert optimizer.takes_slots(bool(is_on_device)) == takes_slots[is_on_device]
        if takes_slots[is_on_device]:
            optimizer.apply(*arguments, slots=slots)
            assert calls == ([(name, 5, slots)] if name in methods else [])
        elif overridden != "apply":
            with pytest.raises(ValueError, match="Derived updates dense arrays only"):
                optimizer.apply(*arguments, slots=slots)
            assert calls == []
