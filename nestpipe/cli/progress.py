"""How far a run is: a bar on a terminal, lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nestpipe.train.run import AfterStep
from nestpipe.train.trainer import FitResult


@contextmanager
def show_progress(num_steps: int, every: int, console: Console) -> Iterator[AfterStep]:
    """What to call after each step, with the result so far."""
    if not console.is_terminal:
        yield _Lines(num_steps, every, console)
        return
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("train", total=num_steps, text="")

        def advance(result: FitResult) -> None:
            bar.update(task, advance=1, text=f"loss {_recent_loss(result):.4f}")

        yield advance


class _Lines:
    def __init__(self, num_steps: int, every: int, console: Console) -> None:
        self._num_steps = num_steps
        self._every = every
        self._console = console
        self._num_done = 0
        self._started = time.perf_counter()

    def __call__(self, result: FitResult) -> None:
        self._num_done += 1
        if self._num_done % self._every == 0 or self._num_done == self._num_steps:
            seconds = time.perf_counter() - self._started
            self._console.print(
                f"step {self._num_done} of {self._num_steps}, loss {_recent_loss(result):.4f}, {seconds:.1f} s",
                highlight=False,
                soft_wrap=True,
            )


def _recent_loss(result: FitResult) -> float:
    """The mean of the last ten steps: single batches scatter."""
    recent = result.losses[-10:]
    return sum(recent) / len(recent)
