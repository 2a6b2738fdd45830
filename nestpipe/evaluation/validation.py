"""Validates while training: metrics at intervals, an early stop, and a checkpoint of the best model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer

LOWER_IS_BETTER = ("loss", "log_loss", "normalised_entropy")
MODES = ("lower", "higher")


class Validation:
    """A callback of Trainer.fit. Use one object for all calls of fit that belong to one training.

    `function` returns numbers by name, the same on every rank, as `evaluate` does. Training ends when the metric has
    not improved in `patience` consecutive validations; nan is never better. The best model is saved to `save_best`.
    """

    def __init__(
        self,
        every: int,
        function: Callable[[Trainer], Mapping[str, float]],
        *,
        metric: str = "loss",
        mode: str | None = None,
        patience: int | None = None,
        save_best: str | Path | None = None,
    ) -> None:
        """mode: whether "lower" or "higher" is better; by default lower for losses and entropies, higher for others."""
        if every < 1:
            raise ValueError(f"every is {every}, must be at least 1 step")
        if patience is not None and patience < 1:
            raise ValueError(f"patience is {patience}, must be at least 1 validation, or None to never stop")
        if mode not in (None, *MODES):
            raise ValueError(f"mode is {mode!r}, must be 'lower' or 'higher'")
        self.every = every
        self.metric = metric
        self.mode = mode or ("lower" if metric in LOWER_IS_BETTER else "higher")
        self.patience = patience
        self.save_best = save_best
        self.best: dict[str, float] | None = None
        """Numbers of the best validation, and its step."""
        self.num_since_best = 0
        """Validations since the best one."""
        self._function = function

    def __call__(self, trainer: Trainer, result: FitResult) -> bool:
        numbers = {"step": trainer.num_steps, **self._function(trainer)}
        if self.metric not in numbers:
            names = ", ".join(name for name in numbers if name != "step")
            raise trainer.world.watch.agreed(ValueError(f"there is no metric {self.metric!r}; there are {names}"))
        result.validations.append(numbers)
        if self._is_better(numbers[self.metric]):
            self.best, self.num_since_best = numbers, 0
            if self.save_best is not None:
                trainer.save(self.save_best, replaces_newer=True)  # the best so far replaces any other
        else:
            self.num_since_best += 1
        return self.is_exhausted

    @property
    def is_exhausted(self) -> bool:
        """Whether the metric has not improved for `patience` validations."""
        return self.patience is not None and self.num_since_best >= self.patience

    def state(self) -> dict[str, Any]:
        """Returns the best validation and the number since then, for a run that is resumed."""
        return {"best": self.best, "num_since_best": self.num_since_best}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.best, self.num_since_best = state["best"], state["num_since_best"]

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return value == value  # not nan
        best = self.best[self.metric]
        return value < best if self.mode == "lower" else value > best
