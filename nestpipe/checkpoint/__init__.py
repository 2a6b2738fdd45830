"""Saves and loads a run: its rows, its dense part, and its position. A checkpoint appears complete, or not at all."""

from nestpipe.checkpoint.agree import agree
from nestpipe.checkpoint.errors import CheckpointError, DamagedError, LeftHalfwayError
from nestpipe.checkpoint.folder import (
    BEST,
    RUN,
    DamagedCheckpoint,
    check_ours,
    claim,
    find_checkpoint,
    move_away,
    newest_checkpoint,
    write_synced,
)
from nestpipe.checkpoint.load import Loaded, load, read_recipe, read_whole
from nestpipe.checkpoint.partial import LoadReport
from nestpipe.checkpoint.save import SaveOptions
from nestpipe.checkpoint.saver import Saver
from nestpipe.checkpoint.subject import Subject

__all__ = [
    "BEST",
    "RUN",
    "CheckpointError",
    "DamagedCheckpoint",
    "DamagedError",
    "LeftHalfwayError",
    "LoadReport",
    "Loaded",
    "SaveOptions",
    "Saver",
    "Subject",
    "agree",
    "check_ours",
    "claim",
    "find_checkpoint",
    "load",
    "move_away",
    "newest_checkpoint",
    "read_recipe",
    "read_whole",
    "write_synced",
]
