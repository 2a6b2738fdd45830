"""Plays faults, a few at a time, and counts by kind what was lost."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

from nestpipe.bench.faults.disk import can_mount
from nestpipe.bench.faults.faults import DISK_KINDS, KINDS, Fault, Outcome, all_settings, deal
from nestpipe.bench.faults.plays import play
from nestpipe.bench.faults.processes import HangError
from nestpipe.bench.faults.recipe import Setting, write_recipe
from nestpipe.bench.faults.trial import Reference, Trial, WrongError, refer
from nestpipe.bench.harness.hosts import ended_by_signals
from nestpipe.bench.harness.report import Record

QUICK_KINDS = ("kill-save", "kill-load", "damage-records")
QUICK_SETTINGS = (Setting("nested", 2, "minimum"),)


class FaultError(RuntimeError):
    """A run has lost something. The text says how to repeat the fault alone."""


def check_possible(kind: str | None) -> None:
    """Raises ValueError for a kind that is not known, or not possible here."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; there are {', '.join(KINDS)}")
    if kind in DISK_KINDS and not can_mount():
        raise ValueError(f"{kind} needs root, to mount a small disk")


def measure(
    quick: bool, count: int, seed: int, kind: str | None, keep_going: bool, jobs: int, parent: Path
) -> Iterator[Record]:
    """Yields a record for each kind, and one for all. Stops at the first fault with a loss, unless it keeps going."""
    kinds = (kind,) if kind is not None else tuple(k for k in KINDS if can_mount() or k not in DISK_KINDS)
    kinds = QUICK_KINDS if quick and kind is None else kinds
    faults = deal(min(count, len(kinds)) if quick else count, seed, kinds)
    settings = QUICK_SETTINGS if quick else all_settings()
    began = time.monotonic()
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="nestpipe-faults-", dir=parent) as folder:
        outcomes = list(play_all(faults, settings, Path(folder), keep_going, jobs))
    seconds = time.monotonic() - began
    for name in dict.fromkeys(fault.kind for fault in faults):
        yield _record(name, seed, [outcome for outcome in outcomes if outcome.fault.kind == name])
    whole = {"jobs": jobs, "seconds": seconds, "seconds_per_fault": seconds / len(outcomes)}
    yield {**_record("all", seed, outcomes), **whole}


def play_all(
    faults: Sequence[Fault], settings: Sequence[Setting], folder: Path, keep_going: bool, jobs: int = 1
) -> Iterator[Outcome]:
    """Yields the outcome of each fault, and prints it. Raises FaultError at the first loss, unless it keeps going.

    jobs: faults that are played at once.
    """
    references = _References(folder)
    play_one = partial(_play_one, settings=settings, references=references, folder=folder)
    with ThreadPoolExecutor(jobs, "fault") as players:
        played = [players.submit(play_one, number, fault) for number, fault in enumerate(faults)]
        try:
            for number, future in enumerate(played):
                outcome, line, problem = future.result()
                print(f"{number + 1}/{len(faults)} {line}", flush=True)
                if problem is not None and not keep_going:
                    raise FaultError(problem)
                if problem is not None:
                    print(problem, flush=True)
                yield outcome
        finally:
            players.shutdown(wait=False, cancel_futures=True)


def _play_one(
    number: int, fault: Fault, settings: Sequence[Setting], references: "_References", folder: Path
) -> tuple[Outcome, str, str | None]:
    """Returns the outcome of a fault, a line about it, and, if something was lost, how to find out why."""
    setting = fault.setting(settings)
    reference = references.find(setting)
    place = folder / f"fault-{number}"
    trial = Trial(fault, setting, place, references.recipe, *_settings_of(fault))
    began, problem = time.monotonic(), ""
    try:
        play(trial, reference)
    except (WrongError, HangError) as error:
        problem = str(error)
        trial.outcome.lost_steps += 1
    finally:
        trial.end()
    outcome = trial.outcome
    line = f"{'' if outcome.is_good else 'FAILED: '}{outcome}; {time.monotonic() - began:.1f} s {problem}".rstrip()
    text = None
    if not outcome.is_good:
        kept = folder.parent / f"{folder.name}-{fault.kind}-{fault.seed}"
        shutil.copytree(place, kept)
        text = _text(outcome, problem, kept, trial.output())
    shutil.rmtree(place)
    return outcome, line, text


class _References:
    """The runs that were left alone. Those of the same number of ranks must have the same digest."""

    def __init__(self, folder: Path) -> None:
        self.recipe = write_recipe(folder)
        self._folder = folder
        self._by_setting: dict[Setting, Reference] = {}
        self._lock = Lock()

    def find(self, setting: Setting) -> Reference:
        with self._lock:
            return self._find(setting)

    def _find(self, setting: Setting) -> Reference:
        if setting not in self._by_setting:
            place = self._folder / f"reference-{len(self._by_setting)}"
            try:
                found = refer(setting, place, self.recipe)
            except (WrongError, HangError) as error:
                raise FaultError(f"without a fault, a run of ({setting}) does not do what it must: {error}") from None
            for other, reference in self._by_setting.items():
                if other.num_ranks == setting.num_ranks and reference.digest != found.digest:
                    raise FaultError(f"without a fault, runs of ({setting}) and ({other}) have different digests")
            self._by_setting[setting] = found
            shutil.rmtree(place, ignore_errors=True)
        return self._by_setting[setting]


def _settings_of(fault: Fault) -> tuple[str, ...]:
    does_continue = fault.kind in DISK_KINDS and fault.kind.endswith("-continue")
    return ("--set", "checkpoint.on_error=continue") if does_continue else ()


def _text(outcome: Outcome, problem: str, kept: Path, output: str) -> str:
    fault = outcome.fault
    return (
        f"{output}\na fault has cost something: {outcome}{'; ' if problem else ''}{problem}\nits files are in {kept}\n"
        f"repeat it alone: nestpipe bench faults --kind {fault.kind} --seed {fault.seed} --count 1 --json PATH"
    )


def _record(kind: str, seed: int, outcomes: Sequence[Outcome]) -> Record:
    seconds = [second for outcome in outcomes for second in outcome.seconds_to_resume]
    times = {"seconds_to_resume": statistics.median(seconds), "seconds_to_resume_high": max(seconds)} if seconds else {}
    return {
        "kind": kind,
        "seed": seed,
        "faults": len(outcomes),
        "ranks": ", ".join(map(str, sorted({outcome.setting.num_ranks for outcome in outcomes}))),
        "schedule": ", ".join(sorted({outcome.setting.schedule for outcome in outcomes})),
        "lost_steps": sum(outcome.lost_steps for outcome in outcomes),
        "digest_mismatches": sum(outcome.is_mismatch for outcome in outcomes),
        "num_refused": sum(outcome.was_refused for outcome in outcomes),
        "num_missed": sum(outcome.num_missed for outcome in outcomes),
        **times,
    }
