"""The context that every preparation works in: its input, its folder, the engine, and reports of progress."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nestpipe.data.files.manifest import Kind
from nestpipe.datasets.engine import Engine, EngineError, Report
from nestpipe.datasets.input_files import Stamp, check_unchanged, checked, gzip_problem
from nestpipe.datasets.text_files import TextFormat, find_bad_line

if TYPE_CHECKING:
    import pyarrow as pa

Progress = Callable[[str, float], None]
"""Takes the stage and the share of the whole that is done, 0 to 1."""


@dataclass(frozen=True)
class PublishedFiles:
    """The published files that were found."""

    name: str
    files: tuple[Path, ...]
    """In the order in which they are read."""
    text_format: TextFormat
    stamps: Mapping[Path, Stamp]
    """Stamps of the files when they were found."""


@dataclass(frozen=True)
class WrittenFile:
    """A finished file in the folder of the work."""

    name: str
    split: str
    num_rows: int


@dataclass(frozen=True)
class Prepared:
    kind: Kind
    schema: "pa.Schema"
    counts: Mapping[str, int]
    files: Sequence[WrittenFile]


class Stages:
    """Stages with their shares of the whole time, as measured once. The estimate of the time left uses them."""

    def __init__(self, progress: Progress, shares: Mapping[str, float]) -> None:
        self._progress = progress
        self._shares = shares

    def begin(self, name: str) -> Report:
        before = sum(list(self._shares.values())[: list(self._shares).index(name)])

        def report(done: float) -> None:
            self._progress(name, before + self._shares[name] * done)

        report(0.0)
        return report


@dataclass(frozen=True)
class Work:
    source: PublishedFiles
    folder: Path
    engine: Engine
    skip_bad: bool
    progress: Progress

    def reading(self, file: Path) -> AbstractContextManager[None]:
        """Checks, while and after a file is scanned, that it is complete and unchanged."""
        return checked(file, self.source.stamps[file])

    def bad_line(self, file: Path) -> ValueError:
        """Returns the error that names a bad line, when the engine has met some."""
        check_unchanged(file, self.source.stamps[file])
        bad = find_bad_line(file, self.source.text_format, skip_bad=self.skip_bad)
        return ValueError(f"{file} {bad or 'has bad lines; leave them out with --skip-bad'}")

    def failed_scan(self, file: Path, error: EngineError) -> Exception:
        """Returns the error that names a bad line if one is the reason, otherwise the engine's error."""
        check_unchanged(file, self.source.stamps[file])
        bad = find_bad_line(file, self.source.text_format, skip_bad=self.skip_bad)
        if bad is not None:
            return ValueError(f"{file} {bad}")
        problem = gzip_problem(file)
        return error if problem is None else ValueError(f"{file}: {problem}; get the file again")

    def num_rejected(self) -> int:
        """Returns the number of lines that the engine could not split into fields."""
        if not self.skip_bad:
            return 0
        return self.engine.number("SELECT count(*) FROM (SELECT DISTINCT scan_id, file_id, line FROM reject_errors)")


def no_good_line(file: Path) -> ValueError:
    return ValueError(f"{file}: no good line in it; get the file again")


def scan_report(source: PublishedFiles, number: int, report: Report) -> Report:
    """Returns the report of the scan of one file; its share of the whole is its share of the bytes."""
    sizes = [source.stamps[file].num_bytes for file in source.files]
    before, total = sum(sizes[:number]), sum(sizes)
    return lambda done: report((before + sizes[number] * done) / total)
