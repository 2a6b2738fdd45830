"""Row optimizers: how the rows of a batch change, once, at its end; the public `nestpipe.rows`.

One of your own: state_width, initial_state if it is not zero, and update, in which every row is treated alike and
alone. The gradient is that of the whole global batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LearningRate = float | Callable[[int], float]
"""A number, or a function of the step, counted from 1."""


class RowOptimizer:
    """The base: a learning rate and lazy weight decay, which touches the rows of the batch only."""

    def __init__(self, lr: LearningRate, weight_decay: float = 0.0) -> None:
        self.lr = lr
        self.weight_decay = weight_decay

    def state_width(self, dim: int) -> int:
        """Columns of row state."""
        return 0

    def initial_state(self, dim: int) -> tuple[float, ...]:
        return (0.0,) * self.state_width(dim)

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        """Changes rows [n, dim] and state [n, state_width(dim)] in place. `step` counts from 1."""
        raise NotImplementedError(f"{type(self).__name__} must define update")

    def apply(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int) -> None:
        if self.weight_decay != 0.0:
            gradient = gradient + self.weight_decay * rows
        self.update(rows, state, gradient, step, self.lr(step) if callable(self.lr) else self.lr)


class SGD(RowOptimizer):
    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        rows.sub_(gradient, alpha=lr)


class Adagrad(RowOptimizer):
    """A sum of squared gradients for each element."""

    def __init__(
        self, lr: LearningRate, initial_accumulator: float = 0.0, eps: float = 1e-10, weight_decay: float = 0.0
    ) -> None:
        super().__init__(lr, weight_decay)
        self.initial_accumulator = initial_accumulator
        self.eps = eps

    def state_width(self, dim: int) -> int:
        return dim

    def initial_state(self, dim: int) -> tuple[float, ...]:
        return (self.initial_accumulator,) * self.state_width(dim)

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        state.addcmul_(gradient, gradient)
        rows.addcdiv_(gradient, _root(state).add_(self.eps), value=-lr)


class RowwiseAdagrad(Adagrad):
    """A sum of mean squared gradients for each row: one column of state, whatever the dimension."""

    def state_width(self, dim: int) -> int:
        return 1

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        state.add_(gradient.square().mean(1, keepdim=True))
        rows.addcdiv_(gradient, _root(state).add_(self.eps), value=-lr)


class Adam(RowOptimizer):
    """Lazy Adam: moments of the rows of the batch only; the bias correction counts all steps."""

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

    def update(self, rows: Tensor, state: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        first, second = state.split(rows.shape[1], dim=1)
        beta1, beta2 = self.betas
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step_size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        rows.addcdiv_(first, _root(second).add_(self.eps), value=-step_size)


def _root(state: Tensor) -> Tensor:
    """Of a copy: records leave gaps between the rows of a state, and torch's sqrt takes eight times as long on those."""
    return state.contiguous().sqrt()


def check_row_optimizer(optimizer: RowOptimizer, dim: int) -> None:
    """Refuses an optimizer whose state does not fit itself, before the first step."""
    width = optimizer.state_width(dim)
    if len(optimizer.initial_state(dim)) != width:
        raise ValueError(
            f"{type(optimizer).__name__}: initial_state has {len(optimizer.initial_state(dim))} values, "
            f"state_width({dim}) is {width}"
        )
    rows, state = torch.zeros(0, dim), torch.zeros(0, width)
    optimizer.apply(rows, state, torch.zeros(0, dim), 1)
