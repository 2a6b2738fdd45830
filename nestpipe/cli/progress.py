"""Shows the progress of a run: a bar on a terminal, lines elsewhere."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nestpipe.recipe.run import AfterStep
from nestpipe.train.fit_result import FitResult


@contextmanager
def show_progress(num_steps: int, every: int, console: Console) -> Iterator[AfterStep]:
    """Yields a function to call after each step with the result so far."""
    if not console.is_terminal:
        yield _Lines(num_steps, every, console)
        return
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("train", total=num_steps, text="")
        validations, steps_done = _Validations(console), count(1)

        def advance(result: FitResult) -> None:
            validations(result)
            done = result.num_steps_before + next(steps_done)
            bar.update(task, completed=done, text=f"loss {_recent_loss(result):.4f}")

        yield advance


class _Lines:
    """Prints a line every few steps."""

    def __init__(self, num_steps: int, every: int, console: Console) -> None:
        self._num_steps = num_steps
        self._every = every
        self._console = console
        self._num_done = 0
        self._started = time.perf_counter()
        self._validations = _Validations(console)

    def __call__(self, result: FitResult) -> None:
        self._num_done += 1
        step = result.num_steps_before + self._num_done
        if step % self._every == 0 or step == self._num_steps:
            seconds = time.perf_counter() - self._started
            self._console.print(
                f"step {step} of {self._num_steps}, loss {_recent_loss(result):.4f}, {seconds:.1f} s",
                highlight=False,
                soft_wrap=True,
            )
        self._validations(result)


class _Validations:
    """Prints a line for each new evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_shown = 0

    def __call__(self, result: FitResult) -> None:
        for numbers in result.validations[self._num_shown :]:
            shown = [f"{name} {value:.4f}" for name, value in numbers.items() if _is_shown(name)]
            text = f"evaluation after step {numbers['step']}: {', '.join(shown)}"
            self._console.print(text, highlight=False, soft_wrap=True)
        self._num_shown = len(result.validations)


def _is_shown(name: str) -> bool:
    """Returns whether a metric is printed. Counts and ceilings are not, as they never change."""
    return not (name == "step" or name.startswith("num_") or name.endswith("_ceiling"))


def _recent_loss(result: FitResult) -> float:
    """Returns the mean of the last ten steps, as losses of single batches scatter."""
    recent = result.losses[-10:]
    return sum(recent) / len(recent) if recent else math.nan  # losses arrive from a device two steps late
