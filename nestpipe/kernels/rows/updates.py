"""Row optimizers on rows in device memory, in place; the formulas are those of `nestpipe.optim`.

rows [n, dim] and state are columns of one array of records; gradient is [n, dim]. is_masked is one bool or int32 in
device memory: if it is true, the step does not count and nothing changes.

slots are [n] distinct int64 on the same device. With them rows and state may have more than n rows: gradient[i] updates
row and state slots[i], and the others do not change.

Where a divisor is zero, which takes an eps that is zero in the dtype, the element of the row does not change: a
gradient of zero with a state of zero has no effect.
"""

from types import ModuleType

from torch import Tensor

from nestpipe.kernels.checks import check_reachable, check_rows, check_shape, check_slots, check_written
from nestpipe.kernels.dispatch import runs_triton
from nestpipe.kernels.rows import reference


def sgd(
    rows: Tensor,
    state: Tensor,
    gradient: Tensor,
    lr: float,
    is_masked: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Updates row -= lr * g. There is no state."""
    _check(rows, state, 0, gradient, is_masked, slots)
    if len(gradient) > 0:
        _form(rows).sgd(rows, gradient, slots, is_masked, lr)


def adagrad(
    rows: Tensor,
    state: Tensor,
    gradient: Tensor,
    lr: float,
    eps: float,
    is_masked: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Updates state += g^2, then row -= lr * g / (sqrt(state) + eps)."""
    _check(rows, state, rows.shape[1], gradient, is_masked, slots)
    if len(gradient) > 0:
        _form(rows).adagrad(rows, state, gradient, slots, is_masked, lr, eps)


def rowwise_adagrad(
    rows: Tensor,
    state: Tensor,
    gradient: Tensor,
    lr: float,
    eps: float,
    is_masked: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Updates state += mean(g^2) over the row, one column, then row -= lr * g / (sqrt(state) + eps)."""
    _check(rows, state, 1, gradient, is_masked, slots)
    if len(gradient) > 0:
        _form(rows).rowwise_adagrad(rows, state, gradient, slots, is_masked, lr, eps)


def adam(
    rows: Tensor,
    state: Tensor,
    gradient: Tensor,
    beta1: float,
    beta2: float,
    step_size: float,
    eps: float,
    is_masked: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Updates state = (first, second moment), then row -= step_size * first / (sqrt(second) + eps)."""
    _check(rows, state, 2 * rows.shape[1], gradient, is_masked, slots)
    if len(gradient) > 0:
        _form(rows).adam(rows, state, gradient, slots, is_masked, beta1, beta2, step_size, eps)


def _form(rows: Tensor) -> ModuleType:
    """Returns the module that updates these rows."""
    if not runs_triton(rows):
        return reference
    from nestpipe.kernels.rows import triton_updates

    return triton_updates


def _check(
    rows: Tensor,
    state: Tensor,
    state_width: int,
    gradient: Tensor,
    is_masked: Tensor | None,
    slots: Tensor | None,
) -> None:
    check_rows({"rows": rows, "state": state, "gradient": gradient})
    check_shape("state", state, len(rows), state_width)
    check_slots(slots, rows, gradient)
    check_written("rows", rows)
    check_written("state", state)
    if is_masked is not None and is_masked.numel() != 1:
        raise ValueError(f"is_masked has shape {list(is_masked.shape)}, must be one bool or int32")
    arrays = {"rows": rows, "state": state, "gradient": gradient, "is_masked": is_masked, "slots": slots}
    check_reachable(arrays)
