"""Saves behind the steps: how much longer steps take while a checkpoint is written, and how much memory that needs."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nestpipe.bench.checkpoint.training import Size
from nestpipe.data.batch import Batch
from nestpipe.store.process_memory import peak_bytes, reset_peak, resident_bytes
from nestpipe.train.fit_result import FitResult
from nestpipe.train.trainer import Trainer


@dataclass
class Behind:
    """One save: its steps, and what they cost."""

    begin_seconds: float
    """Moment at which it began."""
    first_step: int
    num_waits_before: int
    resident_bytes_before: int
    end_seconds: float = 0.0
    last_step: int = 0
    """Step after which the checkpoint was visible."""
    num_waits: int = 0
    growth_bytes: int = 0


@dataclass
class Timeline:
    """A callback that saves at intervals, and a hook that takes the time of each step."""

    trainer: Trainer
    folder: Path
    size: Size
    every: int
    """Steps between two moments at which a save may begin. There the pipeline is drained."""
    ends: list[float] = field(default_factory=list)
    """Moment at which each step ended, with everything that is between it and the next one."""
    saves: list[Behind] = field(default_factory=list)

    def __call__(self, trainer: Trainer, result: FitResult) -> bool:
        """Begins a save, unless one is under way or there were enough."""
        if trainer.saver.is_saving or self._is_too_early():
            return False
        if len(self.saves) == self.size.num_saves:
            return True
        reset_peak()
        moment = time.perf_counter()
        save = Behind(moment, len(self.ends), trainer.saver.num_waits, resident_bytes())
        trainer.save(self.folder, wait=False)
        self.saves.append(save)
        return False

    def after_step(self, result: FitResult) -> None:
        self.ends.append(time.perf_counter())
        save = self.saves[-1] if self.saves else None
        if save is not None and save.end_seconds == 0.0 and not self.trainer.saver.is_saving:
            save.end_seconds, save.last_step = self.ends[-1], len(self.ends) - 1
            save.num_waits = self.trainer.saver.num_waits - save.num_waits_before
            save.growth_bytes = peak_bytes() - save.resident_bytes_before

    def _is_too_early(self) -> bool:
        if not self.saves:
            return len(self.ends) < self.size.steps_between_saves
        is_noted = self.saves[-1].end_seconds > 0.0  # by the step after the one at which it became visible
        return not is_noted or len(self.ends) - self.saves[-1].last_step < self.size.steps_between_saves

    def stall_fractions(self) -> list[float]:
        """Returns, for each save, the extra time of its steps / its own time."""
        durations = [end - begin for begin, end in itertools.pairwise([self.ends[0], *self.ends])]
        return [self._stall_fraction(number, durations) for number in range(len(self.saves))]

    def step_seconds(self) -> float:
        """Returns the median of steps without a save."""
        durations = [end - begin for begin, end in itertools.pairwise([self.ends[0], *self.ends])]
        return statistics.median(s for number in range(len(self.saves)) for s in self._plain(number, durations))

    def _stall_fraction(self, number: int, durations: Sequence[float]) -> float:
        save = self.saves[number]
        during = durations[save.first_step : save.last_step + 1]
        extra = sum(during) - len(during) * statistics.median(self._plain(number, durations))
        return extra / (save.end_seconds - save.begin_seconds)

    def _plain(self, number: int, durations: Sequence[float]) -> list[float]:
        """Returns the steps just before this save, and just before the next one or the end."""
        counted = self.size.counted_between
        first = self.saves[number].first_step
        after = self.saves[number + 1].first_step if number + 1 < len(self.saves) else len(durations) - 1
        return [*durations[first - counted : first], *durations[after - counted : after]]


def save_behind(trainer: Trainer, batches: Iterator[Batch], folder: Path, size: Size) -> Timeline:
    """Trains, with saves at intervals, until there were enough."""
    timeline = Timeline(trainer, folder, size, every=size.counted_between + 1)
    trainer.fit(batches, after_step=timeline.after_step, callbacks=[timeline])
    return timeline
