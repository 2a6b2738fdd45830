"""The folder of a run: its summary, a line for each step, its trace, and events for TensorBoard."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from nestpipe.diagnosis.recorder import RankRecord
from nestpipe.diagnosis.run_file import write_records
from nestpipe.pipelining.stage import STAGES
from nestpipe.pipelining.step_times import StepLog, StepTimes
from nestpipe.recipe.config import LoggingSection
from nestpipe.recipe.value import ConfigError
from nestpipe.train.fit_result import FitResult

SUMMARY, STEPS, TRACE, EVENTS = "summary.json", "steps.jsonl", "trace.json", "tensorboard"


class RunLog:
    """Writes what is known of the steps, on rank 0. A resumed run goes on in the same files.

    A step's time is complete when the next one has begun, and on an accelerator its loss is known some steps later. So
    lines are written as soon as both are there, in order. A disk that fails ends the log, not the run.
    """

    def __init__(self, config: LoggingSection) -> None:
        self.folder = None if config.dir is None else Path(config.dir)
        self._writes_lines = config.jsonl
        self._lines: IO[str] | None = None
        self._events: Any = None
        self._num_steps = 0
        """Steps written so far."""
        self._num_validations = 0
        if self.folder is None and config.tensorboard:
            raise ConfigError("logging.tensorboard is true, but logging.dir, the folder for its events, is not set")
        self._event_writer = _event_writer() if config.tensorboard else None

    def check_folder(self) -> None:
        """Makes the folder. Refuses one that cannot be written, before anything else is done."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _new_file(self.folder / STEPS).write_text("")
            _new_file(self.folder / STEPS).unlink()
        except OSError as error:
            raise ConfigError(f"logging.dir is {self.folder}, which cannot be written: {error}") from None

    def begin(self, num_steps_before: int) -> None:
        """Opens the files. Lines of later steps, from a run that went further than its checkpoint, are removed."""
        with self._tolerant():
            if self.folder is not None and self._writes_lines:
                self._lines = _opened(self.folder / STEPS, num_steps_before)
            if self.folder is not None and self._event_writer is not None:
                self._events = self._event_writer(str(self.folder / EVENTS), purge_step=num_steps_before + 1)

    def after_step(self, result: FitResult) -> None:
        """Writes the steps whose loss and time are known."""
        if self._lines is None and self._events is None:
            return
        num_timed = _num_timed(result)
        for number in range(self._num_steps, min(len(result.losses), num_timed)):
            times = result.times[number - num_timed]  # its oldest entries are dropped, the last one is the newest
            if times.step_ms == 0.0:
                break  # the device has not finished it
            self._write(result.num_steps_before + number + 1, dict(_step(result.losses[number], times)))
            self._num_steps = number + 1
        for validation in result.validations[self._num_validations :]:
            numbers = {f"validation/{name}": value for name, value in validation.items() if name != "step"}
            self._write(int(validation["step"]), numbers)
        self._num_validations = len(result.validations)

    def finish(self, result: FitResult) -> None:
        """Writes the steps that are left, and closes the files."""
        self.after_step(result)
        self._close()

    def write_summary(self, summary: Mapping[str, Any], has_trained: bool) -> None:
        """A run that was complete already leaves the summary that it has."""
        if self.folder is not None and (has_trained or not (self.folder / SUMMARY).exists()):
            with self._tolerant():
                (self.folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")

    def write_measurements(self, records: Sequence[RankRecord]) -> None:
        """Writes what all ranks measured, for `nestpipe monitor`."""
        if self.folder is not None:
            with self._tolerant():
                write_records(records, self.folder)

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        with self._tolerant():
            if self._lines is not None:
                self._lines.write(json.dumps({"step": step, **numbers}) + "\n")
                self._lines.flush()
            for name, value in numbers.items() if self._events is not None else ():
                self._events.add_scalar(name, value, step)

    def _close(self) -> None:
        lines, events, self._lines, self._events = self._lines, self._events, None, None
        with suppress(OSError):  # said already
            if events is not None:
                events.close()
            if lines is not None:
                lines.close()

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Ends the log, with one line, if the disk fails."""
        try:
            yield
        except OSError as error:
            print(f"nestpipe: {self.folder}: {error}; training goes on without a log", file=sys.stderr, flush=True)
            self._close()


def _num_timed(result: FitResult) -> int:
    """Returns the number of steps that have ended."""
    older = result.times.older if isinstance(result.times, StepLog) else []
    return sum(block.num_steps for block in older) + len(result.times)


def _step(loss: float, times: StepTimes) -> Iterator[tuple[str, float]]:
    yield "loss", loss
    yield "num_samples", times.num_samples
    yield "step_ms", times.step_ms
    parts: dict[str, float] = {}
    for name, milliseconds in times.stages.items():
        field = STAGES[name].time_field
        parts[field] = parts.get(field, 0.0) + milliseconds
    yield from parts.items()
    yield from times.sizes.items()


def _opened(file: Path, num_steps_before: int) -> IO[str]:
    """Opens a file of lines to append to, without the lines of later steps."""
    new = _new_file(file)
    with new.open("w") as kept:
        if num_steps_before > 0 and file.exists():
            with file.open(errors="replace") as lines:
                kept.writelines(line for line in lines if _step_of(line) <= num_steps_before)
    new.replace(file)
    return file.open("a")


def _new_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.new")


def _step_of(line: str) -> float:
    """Returns the step of a line; infinity for one that was cut off when the run was killed."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _event_writer() -> Any:
    """Returns the class that writes events."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise ConfigError(
            "logging.tensorboard is true, but TensorBoard is missing; `pip install 'nestpipe[tensorboard]'` installs it"
        ) from None
    return SummaryWriter
