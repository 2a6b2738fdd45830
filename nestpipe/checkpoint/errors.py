"""Errors of checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text says which file and why."""


class DamagedError(CheckpointError):
    """A checkpoint is torn, damaged, or not ours. An older one may still be good."""


class LeftHalfwayError(CheckpointError):
    """A load has failed, and what was there before could not be restored."""
