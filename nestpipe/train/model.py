"""The dense model that a Trainer gets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compiled_model(model: nn.Module) -> Callable[..., Any]:
    from nestpipe.embedding.traceable import compile_model  # imports the compiler, which takes seconds

    return compile_model(model)


def check_device(model: nn.Module, device: torch.device) -> None:
    if elsewhere := {str(p.device) for p in (*model.parameters(), *model.buffers()) if p.device != device}:
        raise ValueError(
            f"the model has parameters or buffers on {', '.join(sorted(elsewhere))}, the ranks train on {device}; call "
            f"model.to({str(device)!r}) before the Trainer is made, or World(device=...)"
        )
