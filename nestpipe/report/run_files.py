"""Reads what a run has left: its summary, a line for each step, and its trace. Any of the three may be missing."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nestpipe.report.trace import IN_FOLDER, RankTrace, read_trace

SUMMARY, STEPS = "summary.json", "steps.jsonl"
VALIDATION = "validation/"
"""Prefix of the numbers of an evaluation in a line of steps.jsonl."""


@dataclass
class Curve:
    """A number by step, for the steps that have it."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float | None) -> None:
        if value is not None:
            self.steps.append(step)
            self.values.append(value)

    def blocks(self, most_points: int) -> tuple["Curve", int]:
        """Returns means over blocks of equally many points, of which there are at most `most_points`, and their size.

        A block stands at its last step.
        """
        size = max(1, math.ceil(len(self.values) / most_points))
        means = Curve()
        for first in range(0, len(self.values), size):
            block = self.values[first : first + size]
            means.add(self.steps[first + len(block) - 1], sum(block) / len(block))
        return means, size


@dataclass(frozen=True)
class RunFiles:
    name: str
    path: Path
    trace: RankTrace | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Empty if the run has none."""
    loss: Curve = field(default_factory=Curve)
    hit_rate: Curve = field(default_factory=Curve)
    metrics: Mapping[str, Curve] = field(default_factory=dict)
    """Numbers of the evaluations while training, by name."""

    def number(self, name: str) -> float | None:
        """Returns a number of the summary; None if it has no such number."""
        return as_number(self.summary.get(name))


def as_number(value: object) -> float | None:
    """Returns a finite number as it is, and None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None  # type: ignore[arg-type, return-value]


def read_runs(paths: Sequence[Path], rank: int = 0) -> list[RunFiles]:
    """Reads folders of logging.dir, or trace files. Runs whose names are equal are called by more of their paths."""
    runs = [_read_run(path, rank) for path in paths]
    return [replace(run, name=name) for run, name in zip(runs, _distinct([run.path for run in runs]), strict=True)]


def _read_run(path: Path, rank: int) -> RunFiles:
    place = path.resolve()
    if path.name == IN_FOLDER and not path.is_dir():  # the run is called after its folder, as in `read_trace`
        return RunFiles("", place.parent, read_trace(path, rank))
    if not path.is_dir():
        return RunFiles("", place.with_suffix(""), read_trace(path, rank))
    if not any((path / name).exists() for name in (SUMMARY, STEPS, IN_FOLDER)):
        raise ValueError(
            f"{path} has no {SUMMARY}, {STEPS} or {IN_FOLDER}; "
            f"`nestpipe train --set logging.dir={path}` writes them when it trains"
        )
    loss, hit_rate, metrics = _read_steps(path / STEPS)
    trace = read_trace(path, rank) if (path / IN_FOLDER).exists() else None
    return RunFiles("", place, trace, _read_summary(path / SUMMARY), loss, hit_rate, metrics)


def _read_summary(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        summary = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a summary that `nestpipe train` has written: {error}") from None
    if not isinstance(summary, dict):
        raise ValueError(f"{path} is not a summary that `nestpipe train` has written: it is not an object")
    return summary


def _read_steps(path: Path) -> tuple[Curve, Curve, dict[str, Curve]]:
    """Reads losses, hit rates and evaluations. Lines that cannot be read, as after a crash, are left out."""
    loss, hit_rate, metrics = Curve(), Curve(), dict[str, Curve]()
    if not path.exists():
        return loss, hit_rate, metrics
    with path.open(errors="replace") as lines:
        for text in lines:
            try:
                line = json.loads(text)
                step = int(line["step"])
            except (ValueError, KeyError, TypeError):
                continue
            loss.add(step, as_number(line.get("loss")))
            hit_rate.add(step, _hit_rate(line))
            for name, value in line.items():
                if name.startswith(VALIDATION):
                    metrics.setdefault(name.removeprefix(VALIDATION), Curve()).add(step, as_number(value))
    return loss, hit_rate, metrics


def _hit_rate(line: Mapping[str, Any]) -> float | None:
    owned, retrieved = as_number(line.get("owned_keys_per_step")), as_number(line.get("retrieved_keys_per_step"))
    return None if retrieved is None or not owned else 1 - retrieved / owned


def _distinct(places: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths, of equally many parts, that differ; equal paths are numbered."""
    longest = max(len(place.parts) for place in places)
    num_parts = next(
        (n for n in range(1, longest) if len({place.parts[-n:] for place in places}) == len(set(places))), longest
    )
    names = ["/".join(place.parts[-num_parts:]) for place in places]
    return [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]
