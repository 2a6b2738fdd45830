"""Verifies checkpoints: reads every byte and compares every checksum."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nestpipe.checkpoint.errors import CheckpointError, DamagedError
from nestpipe.checkpoint.folder import candidates, chain
from nestpipe.checkpoint.manifest import FORMAT, MANIFEST, part_name, read_manifest, read_part
from nestpipe.checkpoint.state_file import Written
from nestpipe.checkpoint.tools.row_stream import is_inside
from nestpipe.checkpoint.tools.saved import Report, SavedCheckpoint, Shard
from nestpipe.checkpoint.tools.state_view import check_file

_STEP = re.compile(r"step-\d{8,}(-r\d+)?")
AfterRead = Callable[[int], None]


@dataclass(frozen=True)
class Problem:
    """A file that is wrong, and how."""

    file: Path
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"


@dataclass
class Verification:
    """What was read, and what is wrong with it."""

    checkpoints: list[Path]
    num_files: int = 0
    num_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    def check(self, file: Path, work: Callable[[], Any]) -> Any:
        """Returns the result of work that reads a file; None if the file is wrong, which is noted."""
        self.num_files += 1
        try:
            return work()
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            text = str(error) if isinstance(error, CheckpointError) else f"makes no sense: {error!r}"
            self.problems.append(Problem(file, text.removeprefix(str(file)).removeprefix(":").strip()))
            return None


@dataclass(frozen=True)
class _File:
    """A file that is still to be read."""

    path: Path
    num_bytes: int
    read: Callable[[AfterRead], None]
    """Raises DamagedError if the file is wrong."""


def verify(path: Path, report: Report = lambda what, share: None) -> Verification:
    """Verifies all checkpoints of a folder, or one with its bases."""
    result = Verification(_checkpoints_at(path))
    files = [file for checkpoint in result.checkpoints for file in _files_of(checkpoint, result)]
    result.problems += _without_manifest(path)
    total = max(sum(file.num_bytes for file in files), 1)
    for file in files:

        def after_read(num_bytes: int, what: str = file.path.parent.name) -> None:
            result.num_bytes += num_bytes
            report(what, min(result.num_bytes / total, 1.0))

        result.check(file.path, partial(file.read, after_read))
    report("all files", 1.0)
    return result


def _checkpoints_at(path: Path) -> list[Path]:
    """Returns the checkpoints of a folder, oldest first, or one behind its bases."""
    found = candidates(path)[::-1]
    if found != [path.resolve()]:
        return found
    try:
        return [checkpoint for checkpoint, _ in chain(found[0])]
    except CheckpointError:
        return found  # verifying it says what is wrong


def _without_manifest(path: Path) -> Iterator[Problem]:
    """Returns the checkpoints of a folder that have lost their manifest."""
    for child in sorted(path.iterdir()):
        if _STEP.fullmatch(child.name) and any(child.glob("rank*")) and not (child / MANIFEST).exists():
            yield Problem(child / MANIFEST, "is missing")


def _files_of(checkpoint: Path, result: Verification) -> list[_File]:
    """Checks the manifest and the parts of a checkpoint. Returns its other files."""
    manifest = result.check(checkpoint / MANIFEST, lambda: _read_manifest(checkpoint))
    if manifest is None:
        return []
    if manifest["format"] != FORMAT:
        names = manifest["checksums"].items()
        return [_whole_file(checkpoint / name, Written(checksum, -1)) for name, checksum in names]
    parts = [
        result.check(checkpoint / part_name(rank), partial(read_part, checkpoint, manifest, rank))
        for rank in range(manifest["world_size"])
    ]
    saved = SavedCheckpoint(checkpoint, manifest, [part for part in parts if part is not None])
    return [
        *(_whole_file(*state) for state in (saved.dense, *saved.rank_states)),
        *(_File(shard.file.path, shard.file.num_bytes, partial(_read_shard, saved, shard)) for shard in saved.shards),
    ]


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest. Raises also if its bases are not there."""
    manifest = read_manifest(checkpoint)
    if manifest.get("format") not in (1, 2, FORMAT):
        raise DamagedError(f"has format {manifest.get('format')}; this version reads 1 to {FORMAT}")
    chain(checkpoint)
    return manifest


def _whole_file(path: Path, expected: Written) -> _File:
    """expected.num_bytes: -1 if the size is not known."""
    size = expected.num_bytes
    if size < 0 and path.is_file():
        size = path.stat().st_size
    return _File(path, max(size, 0), partial(check_file, path, Written(expected.checksum, size)))


def _read_shard(saved: SavedCheckpoint, shard: Shard, after_read: AfterRead) -> None:
    """Reads a shard. The reader checks its blocks; here follows what only the manifest and the part know."""
    names, file = list(saved.tables), shard.file
    rows: Counter[str] = Counter()
    erased: Counter[str] = Counter()
    for block in file.blocks():
        if not 0 <= block.table < len(names):
            raise DamagedError(f"has rows of table number {block.table}, which does not exist")
        table, is_erased = names[block.table], block.piece is None
        keys = block.erased if block.piece is None else block.piece.keys
        assert keys is not None
        (erased if is_erased else rows)[table] += len(keys)
        if not bool(is_inside(table, keys, file.buckets).all()):
            raise DamagedError(f"has keys of other buckets than {file.buckets.start} .. {file.buckets.stop - 1}")
        after_read(8 * len(keys) if block.piece is None else sum(array.nbytes for array in block.piece))
    if (rows, erased) != (Counter(shard.rows), Counter(shard.erased)):
        raise DamagedError("has other numbers of rows than its rank's part says")
