"""Settings that must agree between a checkpoint and a trainer: written at save, checked at load."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nestpipe.checkpoint.subject import Subject
from nestpipe.embedding.table import Table

_TORCH_FLAGS = {"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay", "initial_lr"}
"""Keys of parameter groups that only say how an optimizer computes, or that depend on the version of torch."""


def describe_tables(tables: Sequence[Table], seed: int) -> dict[str, dict[str, Any]]:
    """Returns the settings of each table. max_rows is left out: a run that reached it may go on with a larger one."""
    return {table.name: _describe(table, seed) for table in tables}


def check_tables(manifest: Mapping[str, Any], tables: Sequence[Table], seed: int) -> None:
    saved = manifest.get("tables")
    if not isinstance(saved, Mapping) or saved.keys() != {table.name for table in tables}:
        names = sorted(saved) if isinstance(saved, Mapping) else saved
        raise ValueError(f"tables are {names} in the checkpoint, {sorted(table.name for table in tables)} here")
    for table in tables:
        if manifest["format"] == 1:
            _check_table_of_version_1(saved[table.name], table, seed)
            continue
        current = _describe(table, seed)
        for name in current:
            if saved[table.name].get(name) != current[name]:
                text = f"{saved[table.name].get(name)} in the checkpoint, {current[name]} here"
                raise ValueError(f"table {table.name!r}: {name} is {text}")


def describe_dense(
    model: nn.Module | None, optimizer: Optimizer | None, lr_schedule: LRScheduler | None
) -> dict[str, Any] | None:
    """Returns the settings of the dense optimizer; None without one."""
    if optimizer is None:
        return None
    names = {} if model is None else {parameter: name for name, parameter in model.named_parameters()}
    return {
        "optimizer": type(optimizer).__qualname__,
        "parameters": [
            [names.get(parameter, "?") for parameter in group["params"]] for group in optimizer.param_groups
        ],
        "lr_schedule": None if lr_schedule is None else type(lr_schedule).__qualname__,
    }


def check_dense(manifest: Mapping[str, Any], dense: Mapping[str, Any], subject: Subject) -> None:
    """Refuses another kind of dense optimizer, whose state would load but fail, or go wrong, later."""
    if ("lr_schedule" in dense) != (subject.lr_schedule is not None):
        raise ValueError("only one of the checkpoint and this trainer has a schedule of the dense learning rate")
    for name, part in (("model", subject.model), ("optimizer", subject.optimizer)):
        if (name in dense) != (part is not None):
            raise ValueError(f"only one of the checkpoint and this program has a dense {name}")
    if subject.optimizer is None:
        return
    if manifest["format"] == 1:  # it does not name its optimizer
        _check_group_keys(dense["optimizer"]["param_groups"], subject.optimizer.param_groups)
        return
    saved, current = manifest["dense"], describe_dense(subject.model, subject.optimizer, subject.lr_schedule)
    assert current is not None
    for name, label in (
        ("optimizer", "the dense optimizer"),
        ("lr_schedule", "the schedule of the dense learning rate"),
        ("parameters", "the order of the dense optimizer's parameters"),
    ):
        if saved.get(name) != current[name]:
            raise ValueError(f"{label} is {saved.get(name)} in the checkpoint, {current[name]} here")


def _describe(table: Table, seed: int) -> dict[str, Any]:
    spec = table.spec(seed)
    return {
        "dim": spec.dim,
        "state_width": spec.state_width,
        "initial_state": list(spec.initial_state),
        "init": repr(spec.init),
        "dtype": str(spec.dtype),
        "seed": spec.seed,
        "row_optimizer": None if table.frozen else type(table.optimizer).__qualname__.lower(),
    }


def _check_table_of_version_1(saved: str, table: Table, seed: int) -> None:
    """Version 0.1 saved the text of a TableSpec."""
    spec = table.spec(seed)
    current = (
        f"TableSpec(name={spec.name!r}, dim={spec.dim}, state_width={spec.state_width}, initial_state="
        f"{spec.initial_state!r}, init={spec.init!r}, dtype={spec.dtype}, seed={spec.seed}"
    )
    if saved.partition(", max_rows=")[0] != current:
        raise ValueError(f"table {table.name!r} is {saved} in the checkpoint, {current}) here")


def _check_group_keys(saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]) -> None:
    for old, new in zip(saved, current, strict=False):
        different = sorted((old.keys() ^ new.keys()) - _TORCH_FLAGS)
        if different:
            names = ", ".join(different)
            raise ValueError(f"the dense optimizer is not of the kind that was saved: only one of them has {names}")
