"""A folder of checkpoints: which files are ours, which checkpoint is the newest, and how a new one appears.

    DIR/nestpipe-checkpoints.json     the marker, written first: this folder is ours to write to
    DIR/nestpipe-checkpoints.lock     locked by the process that may write here
    DIR/step-00000060/                one complete checkpoint
    DIR/step-00000080.partial-1f/     one that is being written
    DIR/step-00000050.damaged/        one that was passed over when a run resumed

A checkpoint is written under its `.partial` name. Once every byte is on disk, one rename makes it visible, and only
then are older ones removed. So whenever a run is killed, the newest complete checkpoint is there under its own name.
Only files with our names are ever removed, and only in a folder with our marker; a user's own files stay.

A checkpoint may hold only what has changed since another one, its base, which may have a base itself. A base stays as
long as a checkpoint that is kept needs it.

Version 0.1 wrote the files of its one checkpoint directly into DIR. Such a folder is ours too: its checkpoint is the
oldest, and is removed like others.
"""

import errno
import json
import os
import re
import secrets
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.checkpoint.errors import CheckpointError, DamagedError
from nestpipe.checkpoint.manifest import MANIFEST, read_manifest, read_parts

MARKER = "nestpipe-checkpoints.json"
LOCK = "nestpipe-checkpoints.lock"
RUN, BEST = "the checkpoints of a run", "the best model of a run"
"""Two kinds of folders. The checkpoints of one must not replace those of the other."""
_STEP = re.compile(r"step-(\d{8,})(?:-r(\d+))?")
_LEFTOVER = re.compile(r"step-\d{8,}(-r\d+)?\.(partial|removed)(-?[0-9a-f]+)?")
_OUR_FILES = re.compile(
    r"manifest\.json(\.new)?|dense\.(pt|safetensors)|rank\d+\.(pt|safetensors|json)(\.new)?|rank\d+-shard\d+\.rows"
    r"|\.tmp\w+"  # a state file that safetensors was writing when it was killed
)


MOST_BASES = 1000
"""Longest chain of bases. A longer one is a mistake."""


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that a load has found to be damaged. Once it is renamed, a good one may have its old name."""

    path: Path
    inode: int

    @staticmethod
    def at(path: Path) -> "DamagedCheckpoint":
        return DamagedCheckpoint(path, _inode(path))

    def is_at(self, path: Path) -> bool:
        """Returns whether this is still the checkpoint at a path."""
        return path == self.path and _inode(path) == self.inode


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


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
        problem = problem_of(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    if complete:
        raise CheckpointError(f"every checkpoint in {folder} is damaged: {'; '.join(problems)}")
    return None, []


def candidates(path: Path) -> list[Path]:
    """Returns the checkpoints at a path, newest first: its own, those of its checkpoint.dir, or of a folder that holds
    one such folder."""
    path = path.resolve()
    if not path.exists():
        raise CheckpointError(f"there is no folder {path}; give the checkpoint.dir of a run")
    if _marker(path) is not None:
        complete = checkpoints(path)
        if not complete:
            raise CheckpointError(f"{path} holds no complete checkpoint yet")
        return complete[::-1]
    if (path / MANIFEST).exists() or not path.is_dir():
        return [path]
    inside = sorted({file.parent for name in (MARKER, MANIFEST) for file in path.glob(f"*/{name}")})
    if len(inside) > 1:
        raise CheckpointError(f"{path} holds several checkpoints, {', '.join(map(str, inside))}; name one of them")
    return candidates(inside[0]) if inside else [path]


def find_checkpoint(path: Path) -> Path:
    """Returns the newest checkpoint at a path whose files are all there."""
    found = candidates(path)
    if len(found) == 1:
        return found[0]
    newest, _ = newest_checkpoint(found[0].parent)
    assert newest is not None
    return newest


def begin(folder: Path, step: int, damaged: Sequence[DamagedCheckpoint] = ()) -> Path:
    """Returns an empty folder for the files of a new checkpoint. Removes leftovers of killed saves, and renames
    checkpoints that a load has found to be damaged."""
    for checkpoint in damaged:
        path = folder / checkpoint.path.name
        if checkpoint.is_at(path) and path.is_dir():
            path.rename(_free_path(folder / f"{path.name}.damaged", ""))
    for child in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(child.name) and _is_own_folder(child):
            _remove_our_files(child)
    # A rank of a killed run may still be writing: no name is used twice.
    staging = folder / f"step-{step:08d}.partial-{secrets.token_hex(4)}"
    staging.mkdir()
    return staging


def publish(staging: Path) -> Path:
    """Makes a written checkpoint visible by one rename. Its files must be on disk."""
    problem = problem_of(staging)
    if problem is not None:  # perhaps another run writes to the same folder
        raise CheckpointError(f"{problem}, though it was written just now; is another run writing to {staging.parent}?")
    sync_folder(staging)
    folder, name = staging.parent, staging.name.partition(".")[0]
    path = _free_path(folder / name, "-r")  # the same step may be saved again
    staging.rename(path)
    sync_folder(folder)
    return path


def remove_older(newest: Path, keep: int) -> None:
    """Removes all but the last `keep` checkpoints up to `newest`, and those that were in the folder behind it: they are
    of a run that was given up. Bases of what is kept stay."""
    complete = checkpoints(newest.parent)
    up_to = complete[: complete.index(newest) + 1]
    kept = {checkpoint for last in up_to[-keep:] for checkpoint in _with_bases(last)}
    for checkpoint in reversed([checkpoint for checkpoint in complete if checkpoint not in kept]):  # bases last
        try:
            _remove(checkpoint)
        except OSError as error:  # the new one is complete; the old one only costs disk space
            warnings.warn(f"the older checkpoint {checkpoint} could not be removed: {error}", stacklevel=2)


def chain(checkpoint: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Returns a checkpoint and its bases with their manifests, the complete one first. Raises if one is not there."""
    found: list[tuple[Path, dict[str, Any]]] = []
    path, wanted = checkpoint, None
    while True:
        manifest = read_manifest(path)
        if wanted is not None and manifest.get("save_id") != wanted:
            raise DamagedError(f"{path} is not the checkpoint that {found[-1][0]} is based on")
        found.append((path, manifest))
        base = manifest.get("base")
        if base is None:
            return found[::-1]
        if len(found) > MOST_BASES or not isinstance(base, dict) or not _STEP.fullmatch(str(base.get("name"))):
            raise DamagedError(f"{path / MANIFEST} names a base that cannot be one: {base}")
        path, wanted = checkpoint.parent / base["name"], base.get("save_id")


def _with_bases(checkpoint: Path) -> list[Path]:
    """Returns a checkpoint and those of its bases that can be found."""
    try:
        return [path for path, _ in chain(checkpoint)]
    except (OSError, ValueError, CheckpointError):
        return [checkpoint]


def discard(staging: Path) -> None:
    """Removes a checkpoint that was not written completely. If the disk refuses that, the next save tries again."""
    with suppress(OSError):  # the error that led here is the one to report
        if staging.is_dir():
            _remove_our_files(staging)


def move_away(folder: Path) -> Path | None:
    """Renames DIR to the first free of DIR.1, DIR.2, ..., and returns it; None if DIR holds nothing to keep."""
    check_ours(folder)
    if not folder.exists() or {child.name for child in folder.iterdir()} <= {MARKER, LOCK}:
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
    except (OSError, ValueError, CheckpointError):
        return False


def _foreign(folder: Path) -> list[str]:
    """Returns the names in a folder without our marker that are not ours."""
    has_old_checkpoint = _is_version_1(folder)

    def is_ours(child: Path) -> bool:
        if child.name == f"{MARKER}.new" or (child / MARKER).is_file():
            return True
        return has_old_checkpoint and _OUR_FILES.fullmatch(child.name) is not None

    return sorted(child.name for child in folder.iterdir() if not is_ours(child))


def problem_of(checkpoint: Path) -> str | None:
    """Returns what is wrong with a checkpoint, or None. Looks at names and sizes; a load compares checksums."""
    try:
        for path, manifest in chain(checkpoint):
            is_base = path != checkpoint  # of which only the rows are needed
            sizes = {name: manifest.get("sizes", {}).get(name) for name in manifest["checksums"]}
            if not is_base and (problem := _wrong_size(path, sizes)) is not None:
                return problem
            for part in read_parts(path, manifest):
                if (problem := _wrong_size(path, part.shard_sizes if is_base else part.sizes)) is not None:
                    return problem
    except (OSError, ValueError, CheckpointError) as error:
        return f"{checkpoint}: {error}"
    return None


def _wrong_size(folder: Path, sizes: Mapping[str, int | None]) -> str | None:
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if size is not None and file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes instead of {size}"
    return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
