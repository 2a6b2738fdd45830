"""What the preparation of any format has: its engine, its folder, its input, and a way to say how far it is."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from nestpipe.data.files.manifest import Kind
from nestpipe.datasets.engine import Engine, EngineError, Report
from nestpipe.datasets.input_checks import Stamp, check_unchanged, checked, gzip_problem
from nestpipe.datasets.text_files import TextFormat, find_bad_line

Progress = Callable[[str, float], None]
"""Takes the stage and how much of the whole is done, 0 to 1."""


@dataclass(frozen=True)
class Source:
    """The published files that were found."""

    name: str
    files: tuple[Path, ...]
    """in the order in which they are read"""
    text_format: TextFormat
    stamps: Mapping[Path, Stamp]
    """of the files when they were found"""


@dataclass(frozen=True)
class Made:
    """A file that is ready, in the folder of the work."""

    name: str
    split: str
    num_rows: int


@dataclass(frozen=True)
class Prepared:
    kind: Kind
    schema: pa.Schema
    counts: Mapping[str, int]
    files: Sequence[Made]


class Stages:
    """Stages with their shares of the whole time, as measured once; the estimate of what is left follows from them."""

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
    source: Source
    folder: Path
    engine: Engine
    skip_bad: bool
    progress: Progress

    def reading(self, file: Path) -> AbstractContextManager[None]:
        """Around the scan of a file: it must be whole, and stay as it is."""
        return checked(file, self.source.stamps[file])

    def bad_line(self, file: Path) -> ValueError:
        """The error that names it, when the engine has found some."""
        check_unchanged(file, self.source.stamps[file])
        found = find_bad_line(file, self.source.text_format, skip_bad=self.skip_bad)
        return ValueError(f"{file} {found or 'has bad lines; leave them out with --skip-bad'}")

    def failed_scan(self, file: Path, error: EngineError) -> Exception:
        """The error that names a line if that is the reason, otherwise what the engine says."""
        check_unchanged(file, self.source.stamps[file])
        found = find_bad_line(file, self.source.text_format, skip_bad=self.skip_bad)
        if found is not None:
            return ValueError(f"{file} {found}")
        problem = gzip_problem(file)
        return error if problem is None else ValueError(f"{file}: {problem}; get the file again")

    def num_rejected(self) -> int:
        """Lines that the engine could not split into fields."""
        if not self.skip_bad:
            return 0
        return self.engine.number("SELECT count(*) FROM (SELECT DISTINCT scan_id, file_id, line FROM reject_errors)")


def no_good_line(file: Path) -> ValueError:
    return ValueError(f"{file}: no good line in it; get the file again")


def scan_report(source: Source, number: int, report: Report) -> Report:
    """Of the scan of one of several files, by their sizes."""
    sizes = [source.stamps[file].num_bytes for file in source.files]
    before, total = sum(sizes[:number]), sum(sizes)
    return lambda done: report((before + sizes[number] * done) / total)
