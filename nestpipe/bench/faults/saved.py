"""Reads a folder of checkpoints without the package's own code: which are there, and which bases they need."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step-(\d{8,})(?:-r(\d+))?")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that can be seen under its own name."""

    path: Path
    order: tuple[int, int]
    inode: int
    """It stays the same if the checkpoint is renamed, and no other one has it."""
    save_id: str | None
    base: tuple[str, str] | None
    """Name and save_id of the checkpoint that has the rows that did not change; None if this one has all."""

    @property
    def num_steps(self) -> int:
        return self.order[0]


def saved_in(folder: Path) -> list[Saved]:
    """Returns the checkpoints in a folder, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match, manifest = _NAME.fullmatch(path.name), path / "manifest.json"
        if match is not None and manifest.is_file():
            content = _read(manifest)
            base = content.get("base")
            found.append(
                Saved(
                    path,
                    (int(match[1]), int(match[2] or 0)),
                    path.stat().st_ino,
                    content.get("save_id"),
                    (base["name"], base["save_id"]) if isinstance(base, dict) else None,
                )
            )
    return sorted(found, key=lambda saved: saved.order)


def newest_good(checkpoints: Collection[Saved], torn: Collection[int], spoilt: Collection[int] = ()) -> int | None:
    """Returns the number of steps of the newest checkpoint that is good; None if there is none.

    torn: inodes of checkpoints whose rows are damaged; those that are based on them are, too. spoilt: inodes of those
    of which something else is damaged.
    """
    by_name = {(saved.path.name, saved.save_id): saved for saved in checkpoints}

    def has_rows(saved: Saved | None) -> bool:
        if saved is None or saved.inode in torn:
            return False
        return saved.base is None or has_rows(by_name.get(saved.base))

    good = [saved for saved in checkpoints if saved.inode not in spoilt and has_rows(saved)]
    return max((saved.num_steps for saved in good), default=None)


def _read(manifest: Path) -> dict[str, Any]:
    """Returns the content of a manifest; an empty one if it was damaged."""
    try:
        content = json.loads(manifest.read_bytes())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
