"""A folder of checkpoints: which files are ours, which checkpoint is the newest, and how a new one appears.

    DIR/nestpipe-checkpoints.json    the marker, written first: this folder is ours to write to
    DIR/step-00000060/               one complete checkpoint
    DIR/step-00000080.partial/       one that is being written

A checkpoint is written under its `.partial` name. Once every byte is on disk, one rename makes it visible, and only
then are older ones removed. So whenever a run is killed, the newest complete checkpoint is there under its own name.
Only files with our names are ever removed, and only in a folder with our marker; a user's own files stay.

Version 0.1 wrote the files of its one checkpoint directly into DIR. Such a folder is ours too: it is read, and its
files are removed after the first new checkpoint is complete.
"""

import errno
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

MARKER = "nestpipe-checkpoints.json"
MANIFEST = "manifest.json"
RUN, BEST = "the checkpoints of a run", "the best model of a run"
"""Two kinds of folders. The checkpoints of one must not replace those of the other."""
_STEP = re.compile(r"step-(\d{8,})(?:-r(\d+))?")
_LEFTOVER = re.compile(r"step-\d{8,}(-r\d+)?\.(partial|removed)(\d+)?")
_OUR_FILES = re.compile(r"manifest\.json(\.new)?|dense\.pt|rank\d+\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text says which file and why."""


def claim(folder: Path, holds: str | None = None) -> None:
    """Makes the folder ours: creates it and its marker. Refuses a folder that holds something else."""
    check_ours(folder, holds)
    if _marker(folder) is not None and (holds is None or _marker(folder) == holds):
        return
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    write_synced(folder / MARKER, json.dumps({"written by": "nestpipe", "holds": holds or ""}) + "\n")
    for path in (folder, *(created.parent for created in new_folders)):
        sync_folder(path)


def check_ours(folder: Path, holds: str | None = None) -> None:
    """Refuses a folder with files that we did not write, or with checkpoints of another kind than `holds`."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give checkpoints a folder of their own, new or empty")
    if _marker(folder) is None and folder.exists() and (foreign := _foreign(folder)):
        raise CheckpointError(
            f"{folder} is not empty and is not a folder of checkpoints: it holds {_some(foreign)}. Nothing in it was "
            "touched; give checkpoints a folder of their own, new or empty"
        )
    held = _marker(folder) or (RUN if _is_version_1(folder) else "")
    if holds is not None and held != holds and checkpoints(folder):
        raise CheckpointError(
            f"{folder} is to hold {holds}, but it holds {held or 'checkpoints of a program without a recipe'}; nothing "
            "in it was touched. Give checkpoint.dir and checkpoint.best folders of their own"
        )


def checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, oldest first."""
    by_order = {}
    for child in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(child.name)
        if match is not None and _is_own_folder(child) and (child / MANIFEST).is_file():
            by_order[int(match[1]), int(match[2] or 0)] = child
    complete = [by_order[order] for order in sorted(by_order)]
    return [folder, *complete] if _is_version_1(folder) else complete


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """Returns the newest undamaged checkpoint, or None, and what is wrong with newer ones.

    Raises if there are checkpoints but all are damaged: starting anew would hide the loss.
    """
    problems: list[str] = []
    complete = checkpoints(folder)
    for checkpoint in reversed(complete):
        problem = _problem(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    if complete:
        raise CheckpointError(f"every checkpoint in {folder} is damaged: {'; '.join(problems)}")
    return None, []


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint at a path: its own, its checkpoint.dir, or a folder that holds one such folder."""
    path = path.resolve()
    if not path.exists():
        raise CheckpointError(f"there is no folder {path}; give the checkpoint.dir of a run")
    if _marker(path) is not None:
        newest, _ = newest_checkpoint(path)
        if newest is None:
            raise CheckpointError(f"{path} holds no complete checkpoint yet")
        return newest
    if (path / MANIFEST).exists() or not path.is_dir():
        return path
    inside = sorted({file.parent for name in (MARKER, MANIFEST) for file in path.glob(f"*/{name}")})
    if len(inside) > 1:
        raise CheckpointError(f"{path} holds several checkpoints, {', '.join(map(str, inside))}; name one of them")
    return find_checkpoint(inside[0]) if inside else path


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / MANIFEST
    if not file.exists():
        previous = checkpoint.with_name(f"{checkpoint.name}.previous")  # version 0.1 left the save before it there
        hint = f"; {previous} holds the save before it" if previous.exists() else ""
        raise FileNotFoundError(f"{file} does not exist: {checkpoint} is not a complete checkpoint{hint}")
    manifest = json.loads(file.read_text())
    if not isinstance(manifest, dict) or not isinstance(manifest.get("checksums"), dict):
        raise ValueError(f"{file} is not the manifest of a checkpoint")
    return manifest


def begin(folder: Path, step: int) -> Path:
    """Returns an empty folder for the files of a new checkpoint. Removes leftovers of killed saves."""
    for child in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(child.name) and _is_own_folder(child):
            _remove_our_files(child)
    staging = _free_path(folder / f"step-{step:08d}.partial", "")
    staging.mkdir()
    return staging


def publish(staging: Path) -> Path:
    """Makes a written checkpoint visible by one rename, then removes older ones. Its files must be on disk."""
    problem = _problem(staging)
    if problem is not None:  # perhaps another run writes to the same folder
        raise CheckpointError(f"{problem}, though it was written just now; is another run writing to {staging.parent}?")
    sync_folder(staging)
    folder, name = staging.parent, staging.name.partition(".")[0]
    older = checkpoints(folder)
    path = _free_path(folder / name, "-r")  # the same step may be saved again
    staging.rename(path)
    sync_folder(folder)
    for checkpoint in older:
        try:
            _remove(checkpoint)
        except OSError as error:  # the new one is complete; the old one only costs disk space
            warnings.warn(f"the older checkpoint {checkpoint} could not be removed: {error}", stacklevel=2)
    return path


def discard(staging: Path) -> None:
    """Removes a checkpoint that was not written completely."""
    if staging.is_dir():
        _remove_our_files(staging)


def move_away(folder: Path) -> Path | None:
    """Renames DIR to the first free of DIR.1, DIR.2, ..., and returns it; None if DIR holds nothing to keep."""
    check_ours(folder)
    if not folder.exists() or {child.name for child in folder.iterdir()} <= {MARKER}:
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    sync_folder(folder.parent)
    return target


def write_synced(file: Path, text: str) -> None:
    """Replaces a small file atomically and syncs it to disk."""
    staged = file.with_name(f"{file.name}.new")
    try:
        with staged.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise with_file_name(error, file) from None
    staged.replace(file)


def with_file_name(error: OSError, file: Path) -> OSError:
    """Returns the same error with the file's name and, for a full disk, a plain text."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return OSError(error.errno, "no space left on the disk" if is_full else error.strerror, str(file))


def sync_folder(folder: Path) -> None:
    """Syncs a folder to disk, so that the names in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(checkpoint: Path) -> None:
    """Removes a checkpoint. It is renamed before the first file goes, so under its own name it is complete.

    If a user has put files into it, only ours are removed, the manifest first, and the folder keeps its name.
    """
    is_ours = all(_OUR_FILES.fullmatch(child.name) for child in checkpoint.iterdir())
    if is_ours and _STEP.fullmatch(checkpoint.name):
        target = _free_path(checkpoint.with_name(f"{checkpoint.name}.removed"), "")
        checkpoint.rename(target)
        checkpoint = target
    _remove_our_files(checkpoint)


def _remove_our_files(folder: Path) -> None:
    ours = [child for child in folder.iterdir() if _OUR_FILES.fullmatch(child.name) and not child.is_dir()]
    for file in sorted(ours, key=lambda file: file.name != MANIFEST):
        file.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _free_path(path: Path, mark: str) -> Path:
    """Returns the path, or if it exists, the first free one with `mark` and a number appended."""
    number = 0
    while (free := path if number == 0 else path.with_name(f"{path.name}{mark}{number}")).exists():
        number += 1
    return free


def _is_own_folder(path: Path) -> bool:
    """Returns whether a path is a folder and not a user's link to one."""
    return path.is_dir() and not path.is_symlink()


def _marker(folder: Path) -> str | None:
    """Returns what a folder holds by its marker, possibly an empty text; None if there is no marker."""
    try:
        content = json.loads((folder / MARKER).read_text())
        return str(content["holds"]) if isinstance(content, dict) and "holds" in content else ""
    except FileNotFoundError:
        return None
    except (NotADirectoryError, ValueError):
        return None if not folder.is_dir() else ""


def _is_version_1(folder: Path) -> bool:
    """Returns whether version 0.1 wrote a checkpoint directly into this folder."""
    try:
        return read_manifest(folder).get("format") == 1
    except (OSError, ValueError):
        return False


def _foreign(folder: Path) -> list[str]:
    """Returns the names in a folder without our marker that are not ours."""
    has_old_checkpoint = _is_version_1(folder)

    def is_ours(child: Path) -> bool:
        if child.name == f"{MARKER}.new" or (child / MARKER).is_file():
            return True
        return has_old_checkpoint and _OUR_FILES.fullmatch(child.name) is not None

    return sorted(child.name for child in folder.iterdir() if not is_ours(child))


def _problem(checkpoint: Path) -> str | None:
    """Returns what is wrong with a checkpoint, or None. Looks at names and sizes; `read` compares checksums."""
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
