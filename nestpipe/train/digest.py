"""A hash that is equal exactly when all rows, row state, dense parameters and dense optimizer state are equal."""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.distributed.world import World
from nestpipe.embedding.table import Table
from nestpipe.store import Store


def digest(
    tables: Sequence[Table],
    store: Store,
    num_steps: int,
    world: World,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> str:
    """Returns the digest, the same on every rank. All ranks call it.

    It covers, for each table by name: name, dim, dtype, row count, step count and the sum of record hashes; then the
    dense state by name. If ranks differ in their dense parts, in buffers for example, it is the hash of their digests.
    """
    sha = hashlib.sha256()
    for table in sorted(tables, key=lambda table: table.name):
        part, size = 0, 0
        if world.mesh.replica == 0:  # the other sharding groups have the same rows
            with world.busy():
                part, size = store.digest_part(table.name), store.size(table.name)
        parts = world.control.share_text(f"{part} {size}")
        total = sum(int(text.split()[0]) for text in parts) % 2**256
        num_rows = sum(int(text.split()[1]) for text in parts)
        step_count = 0 if table.frozen else num_steps
        sha.update(f"{table.name}\0{table.dim}\0{table.dtype}\0{num_rows}\0{step_count}\0".encode())
        sha.update(total.to_bytes(32, "little"))
    for name, value in sorted(_dense_state(model, optimizer).items()):
        sha.update(name.encode() + b"\0")
        sha.update(_bytes(value) if isinstance(value, Tensor) else content_digest(value).encode())
    by_rank = world.control.share_text(sha.hexdigest())
    return by_rank[0] if len(set(by_rank)) == 1 else hashlib.sha256("".join(by_rank).encode()).hexdigest()


def content_digest(value: Any) -> str:
    """Returns a hash of a value that may hold tensors, such as a model's extra state. Equal values hash equally."""
    sha = hashlib.sha256()
    _add(sha, value)
    return sha.hexdigest()


def _add(sha: "hashlib._Hash", value: Any) -> None:
    sha.update(f"{type(value).__qualname__}(".encode())
    if isinstance(value, Tensor):
        sha.update(f"{value.dtype} {list(value.shape)} ".encode() + _bytes(value))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            _add(sha, key)
            _add(sha, value[key])
    elif isinstance(value, list | tuple):
        for entry in value:
            _add(sha, entry)
    elif isinstance(value, set | frozenset):
        for text in sorted(map(repr, value)):  # the order of a set depends on the process
            _add(sha, text)
    elif isinstance(value, int | float | complex | str | bytes | None):
        sha.update(repr(value).encode())
    else:
        sha.update(pickle.dumps(value))
    sha.update(b")")


def _bytes(tensor: Tensor) -> bytes:
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()  # one order of entries
        return _bytes(tensor.indices()) + _bytes(tensor.values())
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _dense_state(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Returns tensors, and extra state of the model, by name."""
    named: dict[str, Any] = dict(model.state_dict()) if model is not None else {}
    if model is None or optimizer is None:
        return named
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        for key, value in state.items():
            if value is not None:
                is_number = isinstance(value, int | float)
                tensor = torch.tensor(value, dtype=torch.float64) if is_number else value
                named[f"optimizer/{names.get(parameter, number)}/{key}"] = tensor
    return named
