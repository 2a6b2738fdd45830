"""The subject of a checkpoint: everything of a run, on one rank, that is saved and restored."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nestpipe.checkpoint.dtensors import shard_like
from nestpipe.distributed.world import World
from nestpipe.embedding.table import Table
from nestpipe.store import Store


@dataclass(frozen=True)
class Subject:
    """A Trainer, or a loop of the user's own."""

    world: World
    tables: Sequence[Table]
    store: Store
    seed: int
    num_steps: int
    num_skipped: int
    """Batches of weight 0 so far."""
    num_micro_batches: int
    data_state: Mapping[str, Any] | None
    """Where the data continues after the batches trained so far; None if the data has no state."""
    model: nn.Module | None
    optimizer: Optimizer | None
    lr_schedule: LRScheduler | None
    recipe: str | None
    places: Mapping[str, Any] = field(default_factory=dict)
    """Choices of a Trainer for what is "auto"."""

    def dense_state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "lr_schedule": self.lr_schedule}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_dense_state(self, state: Mapping[str, Any]) -> None:
        """Sets the dense part. A state that lacks a part leaves that part as it is."""
        if self.model is not None and "model" in state:
            self.model.load_state_dict(shard_like(state["model"], self.model.state_dict()))
        if self.optimizer is not None and "optimizer" in state:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            current = self.optimizer.state_dict()
            self.optimizer.load_state_dict(shard_like(state["optimizer"], current, parameters))
        if self.lr_schedule is not None and "lr_schedule" in state:
            self.lr_schedule.load_state_dict(state["lr_schedule"])

    def buffers_and_extra_state(self) -> dict[str, Any]:
        """Returns the model's buffers and extra state, which may differ by rank."""
        if self.model is None:
            return {}
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self.model.state_dict().items() if name not in parameters}


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of the default generators of this process."""
    version, numbers, gauss = random.getstate()
    generator = np.random.get_state(legacy=False)
    assert isinstance(generator, dict)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(numbers), gauss),
        "numpy": {**generator, "state": {**generator["state"], "key": torch.from_numpy(generator["state"]["key"])}},
    }
    module = torch.get_device_module(device)
    if hasattr(module, "get_rng_state"):  # the host's is torch's own
        state["device"] = module.get_rng_state(device)
    return state


def load_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    generator = dict(state["numpy"])
    np.random.set_state({**generator, "state": {**generator["state"], "key": generator["state"]["key"].numpy()}})
    module = torch.get_device_module(device)
    if hasattr(module, "set_rng_state") and "device" in state:
        module.set_rng_state(state["device"], device)
