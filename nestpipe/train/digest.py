"""One number that is equal exactly when all rows, row state, dense parameters and dense optimizer state are."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.distributed.world import World
from nestpipe.embedding.table import Table
from nestpipe.store import HostStore


def digest(
    tables: Sequence[Table],
    store: HostStore,
    num_steps: int,
    world: World,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> str:
    """The same on every rank. Tables by name: name, dim, dtype, row count, step count, sum of record hashes."""
    sha = hashlib.sha256()
    for table in sorted(tables, key=lambda table: table.name):
        with world.busy():
            part = store.digest_part(table.name)
        parts = world.control.share_text(f"{part} {store.size(table.name)}")
        total = sum(int(text.split()[0]) for text in parts) % 2**256
        num_rows = sum(int(text.split()[1]) for text in parts)
        step_count = 0 if table.frozen else num_steps
        sha.update(f"{table.name}\0{table.dim}\0{table.dtype}\0{num_rows}\0{step_count}\0".encode())
        sha.update(total.to_bytes(32, "little"))
    for name, value in sorted(_dense_state(model, optimizer).items()):
        sha.update(name.encode() + b"\0")
        sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _dense_state(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    named = dict(model.state_dict()) if model is not None else {}
    if model is None or optimizer is None:
        return named
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in _sorted(state):
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            named[f"optimizer/{names[parameter]}/{key}"] = tensor
    return named


def _sorted(state: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted((key, value) for key, value in state.items() if value is not None)
