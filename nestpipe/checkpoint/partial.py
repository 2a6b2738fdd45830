"""Loads what still fits into a changed model: tables and dense parameters by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nestpipe.checkpoint.match import describe_dense, describe_tables
from nestpipe.checkpoint.subject import Subject
from nestpipe.embedding.table import Table
from nestpipe.store import TableSpec

Column = tuple[str, Callable[[Tensor], Tensor]]
"""A table, and how saved records, as bytes, become its own."""


@dataclass
class LoadReport:
    """What a load has taken from a checkpoint, made new, and dropped."""

    taken: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = {"taken": self.taken, "made new": self.new, "dropped": self.dropped}
        return "; ".join(f"{name}: {', '.join(entries) or 'nothing'}" for name, entries in parts.items())


def whole_columns(tables: Sequence[str], specs: Mapping[str, TableSpec]) -> list[Column | None]:
    """Returns the columns of tables that were saved exactly as they are now, in the order of the manifest."""
    return [(name, _as_they_are(specs[name])) for name in tables]


def fitting_columns(
    saved: Mapping[str, Mapping[str, Any]], tables: Sequence[Table], seed: int, report: LoadReport
) -> list[Column | None]:
    """Returns the columns of saved tables, in the order of the manifest; None for one that does not fit any more."""
    specs = {table.name: table.spec(seed) for table in tables}
    current = describe_tables(tables, seed)
    columns: list[Column | None] = []
    for name, old in saved.items():
        columns.append(None)
        if name not in specs:
            report.dropped.append(f"table {name}")
        elif any(old.get(key) != current[name][key] for key in ("dim", "dtype")):
            report.dropped.append(f"table {name} (other rows)")
            report.new.append(f"table {name}")
        elif any(old.get(key) != current[name][key] for key in ("row_optimizer", "state_width")):
            columns[-1] = name, _with_new_state(specs[name])
            report.taken.append(f"rows of table {name}")
            report.new.append(f"row state of table {name}")
        else:
            columns[-1] = name, _as_they_are(specs[name])
            report.taken.append(f"table {name}")
    report.new += [f"table {name}" for name in specs if name not in saved]
    return columns


def fitting_dense(
    dense: Mapping[str, Any], manifest: Mapping[str, Any], subject: Subject, report: LoadReport
) -> dict[str, Any]:
    """Returns the dense state with everything that fits, and the present state elsewhere."""
    current = subject.dense_state()
    state, taken = dict(current), set[str]()
    if "model" in current:
        state["model"], taken = _fitting_model(dense.get("model", {}), current["model"], report)
    saved, present = manifest.get("dense"), describe_dense(subject.model, subject.optimizer, subject.lr_schedule)
    if present is None:
        return state
    has_same_optimizer = isinstance(saved, Mapping) and saved.get("optimizer") == present["optimizer"]
    (report.taken if has_same_optimizer else report.new).append("state of the dense optimizer")
    if isinstance(saved, Mapping) and has_same_optimizer:
        names = saved["parameters"], present["parameters"]
        state["optimizer"] = _fitting_optimizer(dense["optimizer"], current["optimizer"], *names, taken)
        if saved["lr_schedule"] == present["lr_schedule"] and "lr_schedule" in current:
            state["lr_schedule"] = dense["lr_schedule"]
    return state


def _fitting_model(
    saved: Mapping[str, Any], current: Mapping[str, Any], report: LoadReport
) -> tuple[dict[str, Any], set[str]]:
    """Returns the model's state with the saved entries of the same name and shape, and the names of those."""
    taken = {name for name, value in saved.items() if name in current and _same_shape(value, current[name])}
    report.taken += [f"dense {name}" for name in current if name in taken]
    report.new += [f"dense {name}" for name in current if name not in taken]
    report.dropped += [f"dense {name}" for name in saved if name not in taken]
    return {name: saved[name] if name in taken else value for name, value in current.items()}, taken


def _fitting_optimizer(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    saved_names: Sequence[Sequence[str]],
    names: Sequence[Sequence[str]],
    taken: set[str],
) -> dict[str, Any]:
    """Returns the present optimizer's groups with the saved state of the parameters that were taken, by name."""
    old = dict(zip(_flat(saved_names), _numbers(saved), strict=True))
    new = dict(zip(_flat(names), _numbers(current), strict=True))
    state = {
        number: saved["state"][old[name]]
        for name, number in new.items()
        if name in taken and name in old and old[name] in saved["state"]
    }
    return {"state": state, "param_groups": current["param_groups"]}


def _numbers(state: Mapping[str, Any]) -> list[int]:
    return [number for group in state["param_groups"] for number in group["params"]]


def _flat(groups: Sequence[Sequence[str]]) -> list[str]:
    return [name for group in groups for name in group]


def _same_shape(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype


def _as_they_are(spec: TableSpec) -> Callable[[Tensor], Tensor]:
    return lambda records: records.view(spec.dtype)


def _with_new_state(spec: TableSpec) -> Callable[[Tensor], Tensor]:
    """Keeps the rows, with the row state of a row that was never trained."""
    initial = torch.tensor(spec.full_initial_state, dtype=spec.dtype)

    def convert(records: Tensor) -> Tensor:
        rows = records.view(spec.dtype)[:, : spec.dim]
        return torch.cat([rows, initial.expand(len(rows), -1)], dim=1)

    return convert
