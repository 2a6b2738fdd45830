"""The prepared folder while it is made: one process at a time, all or nothing, files of others untouched."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from nestpipe.data.files.manifest import FORMAT, MANIFEST

UNFINISHED = "unfinished"
"""Folder within the prepared one that holds everything until the end; it marks what may be started over."""
MARK = "nestpipe data prepare: what it has written in this folder is removed at its end, or when it starts over\n"
"""Content of the lock file; a folder without it was not made by nestpipe."""
_LOCK, _MOVES, _REPLACED = "lock", "moves.json", "replaced"
_PREPARED = re.compile(r"(users|train|validation|test)-\d{5}\.parquet|(items|user_ids)\.parquet")
_WORK = re.compile(rf"spool-\d{{5}}\.parquet|spill|{_MOVES}(\.new)?|{_REPLACED}|manifest\.json(\.unfinished)?")


@contextmanager
def unfinished(target: Path, force: bool) -> Iterator[Path]:
    """Yields an empty folder to work in, for one process at a time, and removes it in the end."""
    folder = target / UNFINISHED
    _check_ours(target)
    if not folder.exists():
        _check_not_finished(target, force)
    with _locked(target):
        try:
            _undo_moves(target)
            _check_ours(target)
            _check_not_finished(target, force)
            _remove_work(folder)
            yield folder
        finally:
            _undo_moves(target)
            _remove_work(folder)
            _remove_if_empty(target)


def move_in(target: Path, names: Sequence[str]) -> None:
    """Moves the files and then the manifest out of the unfinished folder, and those of an older manifest into it.

    If that is interrupted, the older files come back, at the latest when the next run starts.
    """
    folder, replaced = target / UNFINISHED, target / UNFINISHED / _REPLACED
    old = _named_in_manifest(target) if (target / MANIFEST).exists() else []
    for name in names:
        if name not in old and _exists(target / name):
            raise ValueError(f"{target / name} was not made by `nestpipe data prepare`; move it away")
    replaced.mkdir()
    _write(folder / _MOVES, json.dumps([*names, MANIFEST]))
    for name in (MANIFEST, *old):
        if _exists(target / name):
            (target / name).replace(replaced / name)
    for name in (*names, MANIFEST):
        (folder / name).replace(target / name)


def _undo_moves(target: Path) -> None:
    folder, replaced = target / UNFINISHED, target / UNFINISHED / _REPLACED
    if not (folder / _MOVES).exists():
        return
    if (folder / MANIFEST).exists():  # it is moved last
        for name in json.loads((folder / _MOVES).read_text()):
            if not (folder / name).exists() and _exists(target / name):
                (target / name).replace(folder / name)
        for path in sorted(replaced.iterdir(), key=lambda path: path.name == MANIFEST):
            path.replace(target / path.name)
    (folder / _MOVES).unlink()


def _check_ours(target: Path) -> None:
    if not _exists(target):
        return
    if not target.is_dir():
        raise _not_ours(target)
    folder = target / UNFINISHED
    has_manifest, has_folder = (target / MANIFEST).exists(), _exists(folder)
    if has_manifest:
        _named_in_manifest(target)
    if has_folder and not _is_marked(folder) and not _is_blank(folder):
        raise _not_ours(folder)
    if not has_manifest and not (has_folder and _is_marked(folder)) and any(p != folder for p in target.iterdir()):
        raise _not_ours(target)


def _check_not_finished(target: Path, force: bool) -> None:
    if (target / MANIFEST).exists() and not force:
        raise ValueError(f"{target} is prepared already; use it, or replace it with --force")


def _not_ours(path: Path) -> ValueError:
    return ValueError(f"{path} exists and was not made by `nestpipe data prepare`; give another folder")


def _named_in_manifest(target: Path) -> list[str]:
    """Returns the files of a finished folder, of any version."""
    try:
        content = json.loads((target / MANIFEST).read_text())
        names = [file["name"] for file in content["files"]]
        is_ours = content["format"] == FORMAT and all(_PREPARED.fullmatch(name) for name in names)
    except (KeyError, TypeError, ValueError):
        is_ours = False
    if not is_ours:
        raise _not_ours(target / MANIFEST)
    return names


def _is_marked(folder: Path) -> bool:
    try:
        return not folder.is_symlink() and (folder / _LOCK).read_text() == MARK
    except (OSError, UnicodeDecodeError):
        return False


def _is_blank(folder: Path) -> bool:
    """Returns whether a run was killed before it marked the folder; then the folder holds nothing to lose."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    return all(path.name == _LOCK and path.is_file() and path.stat().st_size == 0 for path in folder.iterdir())


def _locked(target: Path) -> TextIO:
    """Returns the lock file, locked and marked. Tries again if its last owner removed it after it was opened here."""
    while (lock := _try_lock(target)) is None:
        pass
    return lock


def _try_lock(target: Path) -> TextIO | None:
    path = target / UNFINISHED / _LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except FileNotFoundError:
        return None
    try:
        _lock(lock, target)
        if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
            _mark(lock)
            return lock
    except BaseException:
        lock.close()
        raise
    lock.close()
    return None


def _lock(lock: TextIO, target: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"{target} is being prepared by another process; wait for it, or end it") from None


def _mark(lock: TextIO) -> None:
    if os.fstat(lock.fileno()).st_size == 0:
        lock.write(MARK)
        lock.flush()


def _remove_work(folder: Path) -> None:
    """Removes what this module and the preparation wrote, and nothing else."""
    for path in folder.iterdir():
        if _PREPARED.fullmatch(path.name) or _WORK.fullmatch(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _remove_if_empty(target: Path) -> None:
    """Removes the lock and the empty folders; keeps them if the folder holds files of others."""
    folder = target / UNFINISHED
    if [path.name for path in folder.iterdir()] == [_LOCK]:
        (folder / _LOCK).unlink()
        with suppress(OSError):  # from here on another process may use the folders
            folder.rmdir()
            target.rmdir()


def _write(path: Path, text: str) -> None:
    """Writes all of the text or nothing."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()
