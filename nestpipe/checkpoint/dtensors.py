"""Loads full tensors into a model or an optimizer whose tensors are sharded: DTensors, as made by `fully_shard`.

A checkpoint holds full tensors, so it does not depend on the number of ranks. Each rank reads all of a tensor and keeps
its own part.
"""

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_ABSENT = object()
"""Stands for an entry that `like` does not have."""


def is_sharded(value: Any) -> bool:
    """Returns whether a value is a DTensor. Does not import DTensors: without them in the process, no value is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def shard_like(value: Any, like: Any, parameters: Sequence[Tensor] | Mapping[Any, Tensor] | None = None) -> Any:
    """Returns `value` with every full tensor distributed as the DTensor at the same path of `like`.

    Tensors whose counterpart is not sharded stay as they are, and so do containers without a sharded tensor: if nothing
    is sharded, the result is `value` itself. All ranks must have the same `value`; no rank communicates.

    like: a model's or an optimizer's state_dict, or the optimizer itself, which gives its parameters, too.

    parameters: for an optimizer's state_dict, its parameters by their keys in "state": a list for torch's own numbers.
    A new optimizer has no state yet. Its tensors then take the placement of their parameter if they have its shape; the
    counter "step" never does. State of another shape stays unsharded, unless `like` has it.

    Raises ValueError if a tensor and its counterpart differ in shape.
    """
    if isinstance(like, Optimizer):
        parameters = [parameter for group in like.param_groups for parameter in group["params"]]
        like = like.state_dict()
    if parameters is None or not isinstance(value, Mapping) or "state" not in value:
        return _shard(value, like, None, "")
    state = {}
    for key, entry in value["state"].items():
        counterpart = _entry(_entry(like, "state"), key)
        state[key] = _shard(entry, counterpart, _parameter(parameters, key), f"['state'][{key!r}]")
    rest = {key: _shard(entry, _entry(like, key), None, f"[{key!r}]") for key, entry in value.items() if key != "state"}
    return _replaced(value, {**rest, "state": _replaced(value["state"], state)})


def _shard(value: Any, like: Any, parameter: Tensor | None, path: str) -> Any:
    if isinstance(value, Tensor):
        if like is _ABSENT and parameter is not None and value.shape == parameter.shape:
            like = parameter
        return _distribute(value, like, path) if is_sharded(like) and not is_sharded(value) else value
    if type(value) in (dict, OrderedDict):
        entries = {
            key: _shard(entry, _entry(like, key), None if key == "step" else parameter, f"{path}[{key!r}]")
            for key, entry in value.items()
        }
        return _replaced(value, entries)
    if type(value) in (list, tuple):
        elements = [_shard(entry, _entry(like, i), parameter, f"{path}[{i}]") for i, entry in enumerate(value)]
        is_same = all(new is old for new, old in zip(elements, value, strict=True))
        return value if is_same else type(value)(elements)
    return value


def _distribute(tensor: Tensor, like: Any, path: str) -> Tensor:
    """Returns this rank's part of a tensor as a DTensor, on the device of `like`: it may be offloaded to the host."""
    from torch.distributed.tensor import distribute_tensor

    if tensor.shape != like.shape:
        raise ValueError(f"{path} has shape {list(tensor.shape)} in the checkpoint and {list(like.shape)} here")
    sharded = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to(like.device)


def _entry(container: Any, key: Any) -> Any:
    """Returns an entry of a dict or a list, or `_ABSENT`."""
    if isinstance(container, Mapping):
        return container.get(key, _ABSENT)
    if isinstance(container, list | tuple) and isinstance(key, int) and key < len(container):
        return container[key]
    return _ABSENT


def _parameter(parameters: Sequence[Tensor] | Mapping[Any, Tensor], key: Any) -> Tensor | None:
    parameter = _entry(parameters if isinstance(parameters, Mapping) else list(parameters), key)
    return parameter if isinstance(parameter, Tensor) else None


def _replaced(mapping: Any, entries: Mapping[Any, Any]) -> Any:
    """Returns the dict itself if the entries are its own, else a copy with the new ones, in the same order."""
    if all(entries[key] is entry for key, entry in mapping.items()):
        return mapping
    copied = type(mapping)((key, entries[key]) for key in mapping)
    if hasattr(mapping, "_metadata"):
        copied._metadata = mapping._metadata
    return copied
