"""Checks what a power failure would have left: when a checkpoint becomes visible, every byte of it must be on disk.

A SIGKILL does not lose what was written but not synced, so ranks log their syncs, and this module compares them with
the files of each checkpoint at the moment of its rename.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = tuple[float, Any]
"""Time and value of a line in the log of a rank."""


def stamp(path: str | Path | int) -> list[int]:
    """Returns what identifies a file or folder in its present state: inode, size, time of the last change."""
    status = os.stat(path)  # noqa: PTH116 - an open file has no path
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def stamps_in(folder: Path) -> dict[str, list[int]]:
    """Returns the stamps of a folder, as ".", and of the files in it."""
    return {".": stamp(folder), **{file.name: stamp(file) for file in folder.iterdir()}}


def unsynced(events: Sequence[Mapping[str, Sequence[Event]]]) -> Iterator[str]:
    """Yields what was not on disk when a checkpoint became visible. events: of each rank, by name."""
    syncs = [event for rank in events for event in rank.get("sync", ())]
    published = list(events[0].get("publish", ()))
    for seconds, (name, stamps, parent) in events[0].get("visible", ()):
        on_disk = {tuple(value) for at, value in syncs if at <= seconds}
        for file, value in stamps.items():
            if tuple(value) not in on_disk:
                yield f"{file} of {name} was not synced before it became visible"
        after = [at for at, _ in published if at >= seconds]
        if after and not any(value[0] == parent and seconds <= at <= after[0] for at, value in syncs):
            yield f"the name of {name} was not synced before the save ended"
