"""From a folder of published files to a prepared folder: all or nothing, the same bytes each time."""

from collections.abc import Callable
from pathlib import Path

from nestpipe.data.published.manifest import Manifest

Progress = Callable[[str, float], None]
"""Takes the stage and how much of the whole is done, 0 to 1."""


def prepare(
    data_format: str, source: Path, target: Path, *, skip_bad: bool, force: bool, progress: Progress
) -> Manifest:
    raise ValueError(f"{data_format} cannot be prepared yet")
