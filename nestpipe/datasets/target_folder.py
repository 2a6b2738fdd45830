"""The prepared folder while it is made: one process at a time, all or nothing, and nobody else's files touched."""

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
"""the folder within the prepared one that has everything until the end; it marks what may be started over"""
MARK = "nestpipe data prepare: what it has written in this folder is removed at its end, or when it starts over\n"
"""in the lock file: without it the folder is somebody else's"""
_LOCK, _MOVES, _REPLACED = "lock", "moves.json", "replaced"
_PREPARED = re.compile(r"(users|train|validation|test)-\d{5}\.parquet|(items|user_ids)\.parquet")
_WORK = re.compile(rf"spool-\d{{5}}\.parquet|spill|{_MOVES}(\.new)?|{_REPLACED}|manifest\.json(\.unfinished)?")


@contextmanager
def unfinished(target: Path, force: bool) -> Iterator[Path]:
    """The folder to work in, fresh, and removed in the end; one process at a time."""
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
    """All files and the manifest, which comes last, from the unfinished folder, in the place of those that an older
    manifest names. Where that ends in the middle, what was there before comes back, at the latest in the next run."""
    folder, replaced = target / UNFINISHED, target / UNFINISHED / _REPLACED
    old = _named_in_manifest(target) if (target / MANIFEST).exists() else []
    for name in names:
        if name not in old and _is_there(target / name):
            raise ValueError(f"{target / name} was not made by `nestpipe data prepare`; move it away")
    replaced.mkdir()
    _write(folder / _MOVES, json.dumps([*names, MANIFEST]))
    for name in (MANIFEST, *old):
        if _is_there(target / name):
            (target / name).replace(replaced / name)
    for name in (*names, MANIFEST):
        (folder / name).replace(target / name)


def _undo_moves(target: Path) -> None:
    folder, replaced = target / UNFINISHED, target / UNFINISHED / _REPLACED
    if not (folder / _MOVES).exists():
        return
    if (folder / MANIFEST).exists():  # it is moved last
        for name in json.loads((folder / _MOVES).read_text()):
            if not (folder / name).exists() and _is_there(target / name):
                (target / name).replace(folder / name)
        for path in sorted(replaced.iterdir(), key=lambda path: path.name == MANIFEST):
            path.replace(target / path.name)
    (folder / _MOVES).unlink()


def _check_ours(target: Path) -> None:
    if not _is_there(target):
        return
    if not target.is_dir():
        raise _not_ours(target)
    folder = target / UNFINISHED
    has_manifest, has_folder = (target / MANIFEST).exists(), _is_there(folder)
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
    """The files of a finished folder, of whatever version."""
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
    """Killed before it was marked: there is nothing that could be lost."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    return all(path.name == _LOCK and path.is_file() and path.stat().st_size == 0 for path in folder.iterdir())


def _locked(target: Path) -> TextIO:
    """The lock file, marked. Whoever had it may have removed it after it was opened here: then there is another."""
    while (lock := _lock_if_there(target)) is None:
        pass
    return lock


def _lock_if_there(target: Path) -> TextIO | None:
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
    """Only what was written here."""
    for path in folder.iterdir():
        if _PREPARED.fullmatch(path.name) or _WORK.fullmatch(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _remove_if_empty(target: Path) -> None:
    """The lock last, and it stays where others have put something beside it. Once it is gone, the folders may already
    be those of another process."""
    folder = target / UNFINISHED
    if [path.name for path in folder.iterdir()] == [_LOCK]:
        (folder / _LOCK).unlink()
        with suppress(OSError):
            folder.rmdir()
            target.rmdir()


def _write(path: Path, text: str) -> None:
    """All of it or nothing."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()
