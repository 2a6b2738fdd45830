"""Row optimizers update the rows of a batch once, at its end; the public `nestpipe.optim`.

To write your own, derive from RowOptimizer and define state_width, initial_state if it is not zero, and update. update
must treat every row alike and independently of the others. The gradient is that of the whole global batch.

An update of your own gets dense arrays: rows and state of the batch, one record for each row of the gradient. An update
whose signature ends in `slots: Tensor | None = None` may instead get the arrays of all slots, and the slots of the
batch: gradient[i] belongs to row and state slots[i]. It must change these only. The slots are distinct int64; None
stands for dense arrays. This saves copies of the records. It holds for update_on_device, too.

If your class keeps nothing between calls, set `can_update_in_parts = True` in it: some gradients may then be returned
during the next batch.
"""

from collections.abc import Callable, Hashable
from ctypes import byref
from functools import cache
from inspect import signature

import torch
from torch import Tensor

from nestpipe.kernels.checks import check_shape, check_slots
from nestpipe.kernels.rows import updates
from nestpipe.registry import optimizers
from nestpipe.store.interface import DTYPES
from nestpipe.store.native.library import NativeOptimizer, NativeRowUpdate, call, pointer

LearningRate = float | Callable[[int], float]
"""A number, or a function of the step, counted from 1."""


class RowOptimizer:
    """Base class: a learning rate, and lazy weight decay, which changes the rows of the batch only."""

    can_update_in_parts = False
    """Whether a step may call `update` several times, each with some of the batch's rows. Then gradients may be
    returned during the next batch. Set it to True, in the class that defines `update`, if nothing is kept between
    calls."""

    def __init__(self, lr: LearningRate, weight_decay: float = 0.0) -> None:
        self.lr = lr
        self.weight_decay = weight_decay

    def state_width(self, dim: int) -> int:
        """Returns the number of columns of a row's state."""
        return 0

    def initial_state(self, dim: int) -> tuple[float, ...]:
        return (0.0,) * self.state_width(dim)

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        """Updates rows [n, dim] and state [n, state_width(dim)] in place. `step` counts from 1."""
        raise NotImplementedError(f"{type(self).__name__} must define update")

    def update_on_device(
        self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float, is_masked: Tensor
    ) -> None:
        """Does the same in device memory, unless `is_masked`, one bool there, is true."""
        before = rows.clone(), state.clone()
        self.update(rows, state, gradient, step, lr)
        for array, old in zip((rows, state), before, strict=True):
            array.copy_(torch.where(is_masked, old, array))

    def apply(
        self,
        rows: Tensor,
        state: Tensor,
        gradient: Tensor,
        step: int,
        is_masked: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> None:
        """Updates rows and state. For rows in device memory `is_masked` says that the step does not count; only the
        device knows it.

        slots: [n] slots of `rows` and `state` that the gradient [n, dim] belongs to; None if they are the rows, in
        order. Only an optimizer that `takes_slots` accepts them.
        """
        if slots is not None and not self.takes_slots(is_on_device=is_masked is not None):
            raise ValueError(f"{type(self).__name__} updates dense arrays only: copy the records out of their slots")
        if self.weight_decay != 0.0:
            gradient = gradient + self.weight_decay * rows
        lr = self.learning_rate(step)
        in_slots = {} if slots is None else {"slots": slots}  # an update may have no such parameter
        if is_masked is None:
            self.update(rows, state, gradient, step, lr, **in_slots)
        elif self._overrides_update():
            RowOptimizer.update_on_device(self, rows, state, gradient, step, lr, is_masked)
        else:
            self.update_on_device(rows, state, gradient, step, lr, is_masked, **in_slots)

    def native(self, step: int, lr: float) -> NativeOptimizer | None:
        """Returns `update` as the native library knows it; None for an update of one's own."""
        return None

    def native_for(self, step: int) -> NativeOptimizer | None:
        """Returns what `apply` does in host memory as the native library knows it, so that it can be done to records
        where they are stored. None if `apply` does something else."""
        methods = {"update", "apply", "native"}
        says = next(vars(kind) for kind in type(self).__mro__ if methods & vars(kind).keys())
        if self.weight_decay != 0.0 or "native" not in says:
            return None
        return self.native(step, self.learning_rate(step))

    def learning_rate(self, step: int) -> float:
        return self.lr(step) if callable(self.lr) else self.lr

    @property
    def updates_in_parts(self) -> bool:
        """Returns whether the update of a step may be done in parts. A class must say so of its own update."""
        methods = {"update", "update_on_device", "apply"}
        kinds = type(self).__mro__
        says = next(i for i, kind in enumerate(kinds) if "can_update_in_parts" in vars(kind))
        updates = next(i for i, kind in enumerate(kinds) if methods & vars(kind).keys())
        return self.can_update_in_parts and says <= updates

    def takes_slots(self, is_on_device: bool) -> bool:
        """Returns whether `apply` takes slots for rows in device memory, or in host memory.

        The methods that it calls must have a parameter for them. Weight decay takes dense rows.
        """
        if self.weight_decay != 0.0 or not _has_slots(type(self).apply):
            return False
        if not is_on_device:
            return _has_slots(type(self).update)
        return not self._overrides_update() and _has_slots(type(self).update_on_device)

    def _overrides_update(self) -> bool:
        """Returns whether a derived class has its own update, but no update_on_device to match."""
        methods = next(vars(kind) for kind in type(self).__mro__ if {"update", "update_on_device"} & vars(kind).keys())
        return "update_on_device" not in methods


@cache
def _has_slots(method: Callable[..., None]) -> bool:
    """Returns whether a method has a parameter `slots`."""
    return "slots" in signature(method).parameters


@optimizers.register("sgd")
class SGD(RowOptimizer):
    """Stochastic gradient descent: row -= lr * g."""

    can_update_in_parts = True

    def native(self, step: int, lr: float) -> NativeOptimizer:
        return NativeOptimizer(NativeOptimizer.SGD, lr)

    def update(
        self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float, slots: Tensor | None = None
    ) -> None:
        if rows.is_cpu:
            _in_one_pass(self.native(step, lr), rows, state, gradient, slots)
        else:  # called by a derived class that has no update_on_device
            rows.sub_(gradient, alpha=lr)

    def update_on_device(
        self,
        rows: Tensor,
        state: Tensor,
        gradient: Tensor,
        step: int,
        lr: float,
        is_masked: Tensor,
        slots: Tensor | None = None,
    ) -> None:
        updates.sgd(rows, state, gradient, lr, is_masked, slots)


class _SumsOfSquares(RowOptimizer):
    """Base class of both kinds of Adagrad: the state is sums of squares, which start at `initial_accumulator`."""

    def __init__(
        self, lr: LearningRate, initial_accumulator: float = 0.0, eps: float = 1e-10, weight_decay: float = 0.0
    ) -> None:
        super().__init__(lr, weight_decay)
        self.initial_accumulator = initial_accumulator
        self.eps = eps

    def initial_state(self, dim: int) -> tuple[float, ...]:
        return (self.initial_accumulator,) * self.state_width(dim)


@optimizers.register("adagrad")
class Adagrad(_SumsOfSquares):
    """Adagrad with a sum for each element: state += g^2, row -= lr * g / (sqrt(state) + eps).

    With eps = 0 an element whose state is zero does not change: its gradient has always been zero.
    """

    can_update_in_parts = True

    def state_width(self, dim: int) -> int:
        return dim

    def native(self, step: int, lr: float) -> NativeOptimizer:
        return NativeOptimizer(NativeOptimizer.ADAGRAD, lr, self.eps)

    def update(
        self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float, slots: Tensor | None = None
    ) -> None:
        _in_one_pass(self.native(step, lr), rows, state, gradient, slots)

    def update_on_device(
        self,
        rows: Tensor,
        state: Tensor,
        gradient: Tensor,
        step: int,
        lr: float,
        is_masked: Tensor,
        slots: Tensor | None = None,
    ) -> None:
        updates.adagrad(rows, state, gradient, lr, self.eps, is_masked, slots)


@optimizers.register("rowwise_adagrad")
class RowWiseAdagrad(_SumsOfSquares):
    """Adagrad with one sum for each row: state += mean(g^2), row -= lr / (sqrt(state) + eps) * g."""

    can_update_in_parts = True

    def state_width(self, dim: int) -> int:
        return 1

    def native(self, step: int, lr: float) -> NativeOptimizer:
        return NativeOptimizer(NativeOptimizer.ROWWISE_ADAGRAD, lr, self.eps)

    def update(
        self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float, slots: Tensor | None = None
    ) -> None:
        if rows.is_cpu:
            _in_one_pass(self.native(step, lr), rows, state, gradient, slots)
        else:  # called by a derived class that has no update_on_device
            state.add_(gradient.square().mean(1, keepdim=True))
            divisor = state.sqrt().add_(self.eps)
            rows.sub_(gradient * (lr / divisor.masked_fill_(divisor == 0, torch.inf)))

    def update_on_device(
        self,
        rows: Tensor,
        state: Tensor,
        gradient: Tensor,
        step: int,
        lr: float,
        is_masked: Tensor,
        slots: Tensor | None = None,
    ) -> None:
        updates.rowwise_adagrad(rows, state, gradient, lr, self.eps, is_masked, slots)


@optimizers.register("adam")
class Adam(RowOptimizer):
    """Lazy Adam: updates the moments of the batch's rows only; the bias correction counts all steps."""

    can_update_in_parts = True

    def __init__(
        self,
        lr: LearningRate,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr, weight_decay)
        self.betas = betas
        self.eps = eps

    def state_width(self, dim: int) -> int:
        return 2 * dim

    def native(self, step: int, lr: float) -> NativeOptimizer:
        return NativeOptimizer(NativeOptimizer.ADAM, self._step_size(step, lr), self.eps, *self.betas)

    def update(
        self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float, slots: Tensor | None = None
    ) -> None:
        _in_one_pass(self.native(step, lr), rows, state, gradient, slots)

    def update_on_device(
        self,
        rows: Tensor,
        state: Tensor,
        gradient: Tensor,
        step: int,
        lr: float,
        is_masked: Tensor,
        slots: Tensor | None = None,
    ) -> None:
        updates.adam(rows, state, gradient, *self.betas, self._step_size(step, lr), self.eps, is_masked, slots)

    def _step_size(self, step: int, lr: float) -> float:
        beta1, beta2 = self.betas
        return float(lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step))


def _in_one_pass(
    optimizer: NativeOptimizer, rows: Tensor, state: Tensor, gradient: Tensor, slots: Tensor | None
) -> None:
    """Updates rows by the native library. Their records have gaps, which make several passes by torch slow."""
    for array in (rows, state):
        if array.dtype != gradient.dtype or array.stride(1) != 1 or not array.is_cpu:
            raise ValueError("rows, state and gradient must be of one dtype, in host memory, row after row")
    check_shape("state", state, len(rows), state.shape[1])
    check_slots(slots, rows, gradient)
    if slots is not None and not slots.is_cpu:
        raise ValueError("slots must be in host memory, as rows are")
    gradient = gradient.contiguous()
    update = NativeRowUpdate(
        pointer(rows),
        pointer(state),
        pointer(gradient),
        pointer(slots),
        len(gradient),
        *rows.shape,
        rows.stride(0),
        state.stride(0),
        DTYPES.index(rows.dtype),
    )
    call("update_rows", byref(optimizer), byref(update), torch.get_num_threads())


def group_key(optimizer: RowOptimizer) -> Hashable:
    """Returns a key that is equal for optimizers which update rows alike.

    Registered ones are compared by class and hyperparameters, a learning rate schedule by identity; a user's own, which
    may hold anything, by identity.
    """
    if not optimizers.holds(type(optimizer)):
        return id(optimizer)
    return type(optimizer), *((name, _comparable(value)) for name, value in sorted(vars(optimizer).items()))


def _comparable(value: object) -> Hashable:
    if callable(value) or not isinstance(value, Hashable | list):
        return id(value)
    return tuple(value) if isinstance(value, list) else value


def check_row_optimizer(optimizer: RowOptimizer, dim: int) -> None:
    """Refuses, before the first step, an optimizer whose initial state does not have its state width."""
    width = optimizer.state_width(dim)
    if len(optimizer.initial_state(dim)) != width:
        raise ValueError(
            f"{type(optimizer).__name__}: initial_state has {len(optimizer.initial_state(dim))} values, "
            f"state_width({dim}) is {width}"
        )
    rows, state = torch.zeros(0, dim), torch.zeros(0, width)
    optimizer.apply(rows, state, torch.zeros(0, dim), 1)
