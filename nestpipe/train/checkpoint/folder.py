"""A folder of checkpoints: what in it is ours, which checkpoint is the newest, and how a new one appears.

    DIR/nestpipe-checkpoints.json    the marker, written first: this folder is ours to write to
    DIR/step-00000060/               one complete checkpoint
    DIR/step-00000080.partial/       one that is being written

A checkpoint is written under its `.partial` name. Once every byte is on disk, one rename makes it visible, and only
then are older ones removed. So whenever a run is killed, the newest complete checkpoint is there under its own name.
Only files with our names are ever removed, and only in a folder with our marker; what else a user puts there stays.

Version 0.1 wrote the files of its one checkpoint directly into DIR. Such a folder is ours too: it is read, and its
files are removed after the first new checkpoint is complete.
"""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

MARKER = "nestpipe-checkpoints.json"
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")
_PARTIAL = re.compile(r"step-\d+\.partial")
_OUR_FILES = re.compile(r"manifest\.json(\.new)?|dense\.pt|rank\d+\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text says which file and why."""


def claim(folder: Path) -> None:
    """Makes the folder ours: creates it with its marker. Refuses a folder that holds something else."""
    if (folder / MARKER).is_file():
        return
    if folder.exists() and (foreign := _foreign(folder)):
        raise CheckpointError(
            f"{folder} is not empty and is no folder of checkpoints: it holds {_some(foreign)}. Nothing in it was "
            "touched; give checkpoints a folder of their own, new or empty"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_synced(folder / MARKER, json.dumps({"what": "checkpoints written by nestpipe"}) + "\n")
    sync_folder(folder)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = {}
    for child in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(child.name)
        if match is not None and (child / MANIFEST).is_file():
            found[int(match[1]), int(match[2] or 0)] = child
    complete = [found[order] for order in sorted(found)]
    return [folder, *complete] if _is_version_1(folder) else complete


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files are all there, and what is wrong with newer ones; None if there is none at all.

    If there are checkpoints and all of them are damaged, that is an error: to start anew instead would hide the loss.
    """
    problems: list[str] = []
    found = checkpoints(folder)
    for checkpoint in reversed(found):
        problem = _problem(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    if found:
        raise CheckpointError(f"every checkpoint in {folder} is damaged: {'; '.join(problems)}")
    return None, []


def find_checkpoint(path: Path) -> Path:
    """A checkpoint by its own path, by its checkpoint.dir, or by a folder that holds one such folder."""
    if not path.exists():
        raise CheckpointError(f"there is no folder {path}; give the checkpoint.dir of a run")
    if (path / MANIFEST).exists() or not path.is_dir():
        return path
    if (path / MARKER).is_file():
        newest, _ = newest_checkpoint(path)
        if newest is None:
            raise CheckpointError(f"{path} holds no complete checkpoint yet")
        return newest
    inside = sorted({file.parent for name in (MARKER, MANIFEST) for file in path.glob(f"*/{name}")})
    if len(inside) > 1:
        raise CheckpointError(f"{path} holds several checkpoints, {', '.join(map(str, inside))}; name one of them")
    return find_checkpoint(inside[0]) if inside else path


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / MANIFEST
    if not file.exists():
        previous = checkpoint.with_name(f"{checkpoint.name}.previous")  # where version 0.1 left the save before it
        hint = f"; {previous} holds the save before it" if previous.exists() else ""
        raise FileNotFoundError(f"{file} does not exist: {checkpoint} is no complete checkpoint{hint}")
    manifest = json.loads(file.read_text())
    if not isinstance(manifest, dict) or not isinstance(manifest.get("checksums"), dict):
        raise ValueError(f"{file} is not the manifest of a checkpoint")
    return manifest


def begin(folder: Path, step: int) -> Path:
    """Returns an empty folder for the files of a new checkpoint. Removes what killed saves have left."""
    for child in list(folder.iterdir()):
        is_leftover = _STEP.fullmatch(child.name) is not None and not (child / MANIFEST).exists()
        if _PARTIAL.fullmatch(child.name) or is_leftover:
            _remove_our_files(child)
    staging = folder / f"step-{step:08d}.partial"
    staging.mkdir()
    return staging


def publish(staging: Path) -> Path:
    """Makes a written checkpoint visible by one rename, then removes the older ones. Its files must be on disk."""
    sync_folder(staging)
    folder, name = staging.parent, staging.name.removesuffix(".partial")
    older = checkpoints(folder)
    path, number = folder / name, 0
    while path.exists():  # the same step, saved again
        number += 1
        path = folder / f"{name}.{number}"
    staging.rename(path)
    sync_folder(folder)
    for checkpoint in older:
        _remove_our_files(checkpoint)
    return path


def discard(staging: Path) -> None:
    """Removes a checkpoint that could not be written to its end."""
    if staging.is_dir():
        _remove_our_files(staging)


def move_away(folder: Path) -> Path | None:
    """Renames DIR to the first of DIR.1, DIR.2, ... that is free; None if there is nothing in it to keep."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / MARKER).is_file() and not _is_version_1(folder):
        claim(folder)  # raises: what is not ours is not moved either
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    sync_folder(folder.parent)
    return target


def write_synced(file: Path, text: str) -> None:
    """Replaces a small file atomically; it is on disk when this returns."""
    staged = file.with_name(f"{file.name}.new")
    try:
        with staged.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise named(error, file) from None
    staged.replace(file)


def named(error: OSError, file: Path) -> OSError:
    """The same error with the file's name; a full disk is called one."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return OSError(error.errno, "no space left on the disk" if is_full else error.strerror, str(file))


def sync_folder(folder: Path) -> None:
    """Names in a folder survive a power failure only once the folder itself is on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_our_files(folder: Path) -> None:
    """The manifest first, so that what is half removed is no checkpoint. Files of a user stay, and so does the folder
    then."""
    ours = [child for child in folder.iterdir() if _OUR_FILES.fullmatch(child.name) and not child.is_dir()]
    for file in sorted(ours, key=lambda file: file.name != MANIFEST):
        file.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _is_version_1(folder: Path) -> bool:
    """Whether version 0.1 wrote a checkpoint directly into this folder."""
    try:
        return read_manifest(folder).get("format") == 1
    except (OSError, ValueError):
        return False


def _foreign(folder: Path) -> list[str]:
    """Names of what we did not write in a folder without our marker."""
    has_old_checkpoint = _is_version_1(folder)

    def is_ours(child: Path) -> bool:
        return (child / MARKER).is_file() or (has_old_checkpoint and _OUR_FILES.fullmatch(child.name) is not None)

    return sorted(child.name for child in folder.iterdir() if not is_ours(child))


def _problem(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, as far as can be told without reading all of it."""
    try:
        manifest = read_manifest(checkpoint)
    except (OSError, ValueError) as error:
        return f"{checkpoint}: {error}"
    sizes = manifest.get("sizes", {})
    for name in manifest["checksums"]:
        file = checkpoint / name
        if not file.is_file():
            return f"{file} is missing"
        if name in sizes and file.stat().st_size != sizes[name]:
            return f"{file} has {file.stat().st_size} bytes instead of {sizes[name]}"
    return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
