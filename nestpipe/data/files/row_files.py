"""Parquet and Arrow files: opened, checked for changes, read one row group at a time."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from glob import has_magic
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET, ARROW = b"PAR1", b"ARROW1"
SUFFIXES = (".parquet", ".arrow", ".feather")
FOOTERS_KEPT = 16
"""Number of parsed footers that are cached."""
OPEN_AT_A_TIME = 8


class BadDataError(ValueError):
    """Data cannot be read or does not fit its schema. The text names file, row group and row."""


class UnreadableError(BadDataError):
    """A file or a whole row group is damaged. data.skip_bad leaves it out."""


@dataclass(frozen=True)
class RowFile:
    """A file as it was when it was opened. Once it has changed, it is refused."""

    path: Path
    is_parquet: bool
    size_bytes: int
    changed_ns: int
    footer: bytes
    """Hash of the footer."""
    group_rows: tuple[int, ...]

    def where(self, group: int, row: int | None = None) -> str:
        return f"{self.path}, row group {group}" + ("" if row is None else f", row {row}")


def find_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Expands files, folders of files, and patterns such as logs/*.parquet; sorts the files of each."""
    expanded: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        if Path(path).is_dir():
            files = sorted(file for file in Path(path).iterdir() if file.suffix in SUFFIXES and file.is_file())
        elif has_magic(str(path)) and not Path(path).exists():
            root = Path(path).anchor
            files = sorted(Path(root).glob(str(Path(path).relative_to(root))))
        else:
            files = [Path(path)]
        if not files:
            raise BadDataError(f"there are no files {path}; a folder must have some that end in {', '.join(SUFFIXES)}")
        expanded += files
    if not expanded:
        raise BadDataError("no paths of data were given; name files, folders, or patterns such as logs/*.parquet")
    return expanded


def open_files(paths: Sequence[Path]) -> tuple[list[tuple[RowFile, "pa.Schema"]], list[UnreadableError]]:
    """Opens files; returns those that can be read, in this order, with their schemas, and the errors of the others."""
    with ThreadPoolExecutor(OPEN_AT_A_TIME) as pool:
        opened = list(pool.map(_opened, paths))
    failures = [result for result in opened if isinstance(result, UnreadableError)]
    return [result for result in opened if not isinstance(result, UnreadableError)], failures


def _opened(path: Path) -> tuple[RowFile, "pa.Schema"] | UnreadableError:
    try:
        return open_file(path)
    except UnreadableError as error:
        return error


def open_file(path: Path) -> tuple[RowFile, "pa.Schema"]:
    """Opens a file and reads its footer, but no rows."""
    import pyarrow as pa

    try:
        stat = path.stat()
        footer, is_parquet = _footer(path, stat.st_size)
        contents = _parquet(path) if is_parquet else _arrow(path)
    except UnreadableError:
        raise
    except FileNotFoundError:
        raise BadDataError(f"there is no file {path}") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadableError(f"{path} cannot be opened: {_line(error)}; restore it, or leave it out") from None
    group_rows, schema = contents
    return RowFile(path, is_parquet, stat.st_size, stat.st_mtime_ns, footer, group_rows), schema


def read_group(file: RowFile, group: int, columns: Sequence[str]) -> "pa.Table":
    """Reads a row group. Raises if the file has changed since it was opened, before or after reading."""
    import pyarrow as pa

    _check_unchanged(file, with_footer=True)
    try:
        table = _read(file, group, columns)
    except (pa.ArrowException, OSError, ValueError) as error:
        _check_unchanged(file)
        raise UnreadableError(f"{file.where(group)}: cannot be read: {_line(error)}") from None
    _check_unchanged(file)
    if table.num_rows != file.group_rows[group]:
        raise UnreadableError(
            f"{file.where(group)}: has {table.num_rows} rows, but the footer says {file.group_rows[group]}"
        )
    return table


def _read(file: RowFile, group: int, columns: Sequence[str]) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.is_parquet:
        metadata = _metadata(file)
        with pq.ParquetFile(file.path, metadata=metadata, page_checksum_verification=True) as opened:
            return opened.read_row_group(group, columns=list(columns), use_threads=False)
    # The file is not mapped into memory: if it were cut off meanwhile, the process would be killed.
    with pa.OSFile(str(file.path)) as source:
        return pa.Table.from_batches([pa.ipc.open_file(source).get_batch(group)]).select(list(columns))


@lru_cache(FOOTERS_KEPT)
def _metadata(file: RowFile) -> Any:
    import pyarrow.parquet as pq

    return pq.read_metadata(file.path)


def _parquet(path: Path) -> tuple[tuple[int, ...], "pa.Schema"]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as opened:
        metadata = opened.metadata
        rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        return rows, opened.schema_arrow


def _arrow(path: Path) -> tuple[tuple[int, ...], "pa.Schema"]:
    import pyarrow as pa

    with pa.OSFile(str(path)) as source:
        opened = pa.ipc.open_file(source)
        # One column is enough to count the rows.
        one = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[0]))
        return tuple(one.get_batch(i).num_rows for i in range(opened.num_record_batches)), opened.schema


def _footer(path: Path, size_bytes: int) -> tuple[bytes, bool]:
    """Returns a hash of the footer, and whether the file is Parquet."""
    if size_bytes == 0:
        raise UnreadableError(f"{path} is empty (0 bytes); write it again, or leave it out")
    with path.open("rb") as file:
        start = file.read(len(ARROW))
        is_parquet = start.startswith(PARQUET)
        if not is_parquet and start != ARROW:
            raise UnreadableError(f"{path} is neither Parquet nor an Arrow file (IPC file format): it begins {start!r}")
        magic = PARQUET if is_parquet else ARROW
        file.seek(max(0, size_bytes - len(magic) - 4))
        end = file.read()
        num_bytes = int.from_bytes(end[:4], "little")
        if end[4:] != magic or num_bytes + len(end) + len(magic) > size_bytes:
            raise UnreadableError(f"{path} is cut off or not written to its end: its footer is missing; write it again")
        file.seek(size_bytes - len(end) - num_bytes)
        return blake2b(file.read(num_bytes), digest_size=16).digest(), is_parquet


def _check_unchanged(file: RowFile, with_footer: bool = False) -> None:
    try:
        stat = file.path.stat()
        is_same = (stat.st_size, stat.st_mtime_ns) == (file.size_bytes, file.changed_ns)
        if is_same and with_footer:
            is_same = _footer(file.path, stat.st_size) == (file.footer, file.is_parquet)
    except (OSError, UnreadableError):
        is_same = False
    if not is_same:
        raise BadDataError(
            f"{file.path} has changed or gone since it was opened; rows would come twice or never. Do not "
            "write it while it is read, and start again from a checkpoint"
        )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
