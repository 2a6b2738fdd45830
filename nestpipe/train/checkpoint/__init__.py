"""Saves and loads a Trainer. A checkpoint is complete and checked, or it does not appear at all."""

from nestpipe.train.checkpoint.content import Loaded, agree, load, read_recipe, read_whole, save
from nestpipe.train.checkpoint.folder import (
    BEST,
    RUN,
    CheckpointError,
    check_ours,
    claim,
    find_checkpoint,
    move_away,
    newest_checkpoint,
)

__all__ = [
    "BEST",
    "RUN",
    "CheckpointError",
    "Loaded",
    "agree",
    "check_ours",
    "claim",
    "find_checkpoint",
    "load",
    "move_away",
    "newest_checkpoint",
    "read_recipe",
    "read_whole",
    "save",
]
