"""A trial: a run that a fault hits, is started again until it is complete, and is compared with one left alone."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.bench.faults.faults import Fault, Outcome
from nestpipe.bench.faults.moments import Hit
from nestpipe.bench.faults.power import unsynced
from nestpipe.bench.faults.processes import Command, Run
from nestpipe.bench.faults.recipe import NUM_STEPS, Setting, arguments_of
from nestpipe.bench.faults.saved import Saved, newest_good, saved_in


class WrongError(AssertionError):
    """A run did not do what it must do after a fault."""


@dataclass(frozen=True)
class Reference:
    """A run that was left alone."""

    digest: str
    start_seconds: float
    """From its start to its first step."""
    step_seconds: float
    counts: Sequence[Mapping[str, int]]
    """How often each rank reaches each moment."""


class Trial:
    """The runs of one folder of checkpoints."""

    def __init__(self, fault: Fault, setting: Setting, folder: Path, recipe: Path, *more: str) -> None:
        self.fault, self.setting = fault, setting
        self.random = fault.random()
        self.disk = folder / "disk"
        self.checkpoints = self.disk / "checkpoints"
        self.outcome = Outcome(fault, setting)
        self._folder, self._recipe, self._more = folder, recipe, more
        self._commands: list[Command] = []
        self._runs: list[Run] = []
        self._first_counted = 0
        """First command whose checkpoints must still be good."""
        self._torn: set[int] = set()
        self._spoilt: set[int] = set()
        self.disk.mkdir(parents=True)

    def say(self, text: str) -> None:
        self.outcome.texts.append(text)

    def start(self, hits: Mapping[int, Sequence[Hit]] | None = None, *more: str) -> Run:
        """Starts the run, or goes on with it."""
        number = len(self._commands)
        arguments = arguments_of(self.setting, self._recipe, self.checkpoints, self._summary, *self._more, *more)
        logs = self._folder / f"run-{number}"
        command = Command(arguments, self.setting.num_ranks, self.checkpoints, logs, hits or {})
        self._commands.append(command)
        self._summary.unlink(missing_ok=True)
        self._runs.append(Run(command))
        return self._runs[-1]

    def run(self, hits: Mapping[int, Sequence[Hit]] | None = None, *more: str) -> int:
        """Runs until all processes have ended. Returns the exit code."""
        return self.wait(self.start(hits, *more))

    def end(self) -> None:
        """Kills all processes that are left of its runs."""
        for run in self._runs:
            run.end()

    def wait(self, run: Run) -> int:
        """Waits for the end of a run. What has become visible must be on disk."""
        code = run.wait()
        for problem in unsynced([run.command.all_events(rank) for rank in self._ranks]):
            raise WrongError(problem)
        return code

    @property
    def last(self) -> Command:
        return self._commands[-1]

    @property
    def _summary(self) -> Path:
        return self._folder / "summary.json"

    def begin_anew(self) -> None:
        """Removes all checkpoints: the fault did not hit."""
        self.outcome.num_missed += 1
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        self._first_counted = len(self._commands)

    def note_damage(self, victim: Saved, spoils_rows: bool) -> int | None:
        """Takes note that a checkpoint was damaged. Returns the steps of the newest good one, or None."""
        (self._torn if spoils_rows else self._spoilt).add(victim.inode)
        self._first_counted = len(self._commands)
        return self._newest_visible()

    def sleep(self, run: Run, reference: Reference) -> str:
        """Waits for a random moment of a run, or until it has ended. Returns a text that says when that is."""
        step = self.random.randrange(self.newest(), NUM_STEPS + 1)
        is_start = self.random.random() < 0.2
        most_seconds = reference.start_seconds if is_start else 2 * reference.step_seconds
        seconds = self.random.uniform(0, most_seconds)
        while not is_start and run.is_alive and max(run.command.steps(), default=0) < step:
            time.sleep(0.002)
        time.sleep(seconds)
        return f"{seconds:.3f} s after {'the start' if is_start else f'step {step}'}"

    def was_hit(self, rank: int) -> bool:
        return bool(self.last.events(rank, "hit"))

    def steps_trained(self) -> int:
        """Returns the steps of the last run, those before it was resumed included. All ranks must have the same."""
        steps = {max((value for _, value in self.last.events(rank, "step")), default=0) for rank in self._ranks}
        if len(steps) > 1:
            raise WrongError(f"ranks stopped after different steps, {sorted(steps)}")
        return int(steps.pop())

    @property
    def _ranks(self) -> range:
        return range(self.setting.num_ranks)

    def newest(self) -> int:
        """Returns the steps of the newest checkpoint: the newest that can be seen, or that rank 0 has published."""
        counted = self._commands[self._first_counted :]
        published = [name for command in counted for _, name in command.events(0, "publish")]
        return max([self._newest_visible() or 0, *(int(name.split("-")[1]) for name in published)])

    def _newest_visible(self) -> int | None:
        return newest_good(saved_in(self.checkpoints), self._torn, self._spoilt)

    def check_failed(self, code: int, text: str | None = None) -> None:
        """Raises unless the last run has failed, and has printed the text."""
        if code == 0:
            raise WrongError("the run ended with exit code 0, though a fault had hit it")
        if text is not None and text not in self.last.output():
            raise WrongError(f"the run ended with exit code {code}, but it did not print {text!r}")

    def check_load(self, expected: int) -> None:
        """Counts the steps between the newest good checkpoint and the one that the last run has loaded."""
        loaded = [steps for _, steps in self.last.events(0, "load")]
        resumed = loaded[0] if loaded else 0
        self.say(f"resumed from step {resumed}")
        if resumed != expected:
            self.outcome.lost_steps += abs(expected - resumed)
            self.say(f"the newest good checkpoint has {expected} steps")
        if not loaded and expected > 0:
            self.say("nothing was loaded")

    def complete(self, expected: int, digest: str) -> None:
        """Starts the run again, and lets it end. It must go on from the expected step and end with the digest."""
        run = self.start()
        code = self.wait(run)
        if code != 0:
            raise WrongError(f"the run ended with exit code {code} when it was started again")
        self.check_load(expected)
        self._time_to_resume(run)
        self.check_digest(digest)

    def check_digest(self, digest: str) -> None:
        summary = self.summary()
        if summary["steps"] != NUM_STEPS:
            raise WrongError(f"the run has {summary['steps']} steps, must have {NUM_STEPS}")
        if summary["digest"] != digest:
            self.outcome.is_mismatch = True
            self.say(f"its digest is {summary['digest'][:12]}, must be {digest[:12]}")

    def summary(self) -> dict[str, Any]:
        if not self._summary.exists():
            raise WrongError("the run has written no summary")
        summary: dict[str, Any] = json.loads(self._summary.read_text())
        return summary

    @property
    def has_summary(self) -> bool:
        return self._summary.exists()

    def _time_to_resume(self, run: Run) -> None:
        loads, steps = run.command.events(0, "load"), run.command.events(0, "step")
        if loads and steps:
            self.outcome.seconds_to_resume.append(steps[0][0] - run.started)

    def output(self) -> str:
        return self.last.output() if self._commands else ""


def refer(setting: Setting, folder: Path, recipe: Path) -> Reference:
    """Runs without a fault; and once more, which loads the last checkpoint and trains nothing."""
    trial = Trial(Fault("none", 0), setting, folder, recipe)
    try:
        return _refer(trial)
    finally:
        trial.end()


def _refer(trial: Trial) -> Reference:
    run = trial.start()
    if trial.wait(run) != 0:
        raise WrongError(f"it failed\n{trial.output()}")
    steps = run.command.events(0, "step")
    digest = trial.summary()["digest"]
    trial.complete(NUM_STEPS, digest)
    if not trial.outcome.is_good:
        raise WrongError(str(trial.outcome))
    counts = [
        {**trial.last.events(rank, "counts")[0][1], **run.command.events(rank, "counts")[0][1]}
        for rank in range(trial.setting.num_ranks)
    ]
    return Reference(digest, steps[0][0] - run.started, (steps[-1][0] - steps[0][0]) / (len(steps) - 1), counts)
