"""Published files as text: their columns, what the fields may hold, and SQL that reads them."""

import gzip
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

LONGEST_LINE_BYTES = 2_000_000
"""Limit of the engine."""


@dataclass(frozen=True)
class Field:
    """The values that a column may hold, twice: as SQL for the engine, and as a pattern that finds the bad line.

    Both must accept the same texts.
    """

    what: str
    """Description for error messages."""
    pattern: re.Pattern[str]
    value: str
    """SQL for the value of the text {0}, or null."""
    good: str
    """SQL that is true if the text {0} is allowed; {1} is its value."""

    def accepts(self, text: str) -> bool:
        if self.pattern.fullmatch(text) is None:
            return False
        return self.value != _BIGINT or text == "" or -(2**63) <= int(text) < 2**63


_BIGINT = "TRY_CAST({0} AS BIGINT)"
# The engine reads 1.5 as 2, and +1, 01 and 1e0 as 1, so a number must print as the text that it was read from.
_SAME = "CAST({1} AS VARCHAR) = {0}"
WHOLE = Field("a whole number, 0 or more", re.compile("0|[1-9][0-9]*"), _BIGINT, f"{_SAME} AND {{1}} >= 0")
INTEGER = Field("an integer, or nothing", re.compile("0|-?[1-9][0-9]*|"), _BIGINT, f"({{0}} IS NULL OR {_SAME})")
LABEL = Field("0 or 1", re.compile("[01]"), "CAST({0} = '1' AS BIGINT)", "{0} IN ('0', '1')")
HEX = Field(
    "8 hexadecimal digits, or nothing",
    re.compile("[0-9a-fA-F]{8}|"),
    "CAST(TRY_CAST('0x' || {0} AS UINTEGER) AS BIGINT)",
    "({0} IS NULL OR (length({0}) = 8 AND {1} IS NOT NULL AND NOT contains({0}, '_')))",
)


@dataclass(frozen=True)
class TextFormat:
    delimiter: str
    columns: tuple[str, ...]
    """All columns of a line, in order."""
    fields: Mapping[str, Field]
    """The columns that are read."""
    has_header: bool

    def lines(self, file: Path, *, skip_bad: bool) -> str:
        """Returns SQL for the columns that are read, and whether a line is `good`, in the order of the file."""
        texts = {name: _quoted(name) for name in self.fields}
        values = {name: _quoted(f"value of {name}") for name in self.fields}
        inner = ", ".join(f"{texts[n]}, {f.value.format(texts[n])} AS {values[n]}" for n, f in self.fields.items())
        tests = " AND ".join(f.good.format(texts[n], values[n]) for n, f in self.fields.items())
        outer = ", ".join(f"{values[n]} AS {texts[n]}" for n in self.fields)
        scan = self._scan(file, skip_bad)
        return f"SELECT {outer}, coalesce({tests}, false) AS good FROM (SELECT {inner} FROM {scan})"

    def _scan(self, file: Path, skip_bad: bool) -> str:
        """Returns SQL for all columns as text, without blank lines.

        A line with a wrong number of fields is an error or, with skip_bad, a row of the table reject_errors.
        """
        columns = ", ".join(f"{_text(name)}: 'VARCHAR'" for name in self.columns)
        options = {
            "columns": f"{{{columns}}}",
            "delim": _text(self.delimiter),
            "quote": "''",
            "escape": "''",
            "auto_detect": "false",
            "header": "false",
            "skip": str(int(self.has_header)),
            "compression": "'gzip'" if is_gzip(file) else "'none'",
            "store_rejects": str(skip_bad).lower(),
        }
        listed = ", ".join(f"{name} = {value}" for name, value in options.items())
        return f"read_csv({_text(_literal_path(file))}, {listed})"

    def problem(self, line: bytes) -> str | None:
        """Returns what is wrong with a line, given without its end; None if it is good or blank.

        Fields that are not read may hold any bytes.
        """
        texts = line.decode(errors="surrogateescape").split(self.delimiter)
        if texts == [""]:
            return None
        if len(line) > LONGEST_LINE_BYTES:
            return f"is longer than {LONGEST_LINE_BYTES:,} bytes"
        while len(texts) > len(self.columns) and texts[-1] == "":
            texts.pop()  # the engine ignores delimiters at the end
        if len(texts) != len(self.columns):
            return f"has {len(texts)} fields, must have {len(self.columns)}"
        for name, text in zip(self.columns, texts, strict=True):
            field = self.fields.get(name)
            if field is not None and not field.accepts(text):
                if not _is_utf8(text):
                    return f"{name} is not UTF-8"
                return f"{name} is {text[:40]!r}, must be {field.what}"
        return None


def is_gzip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"\x1f\x8b"


def open_text(file: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file)) if is_gzip(file) else file.open("rb")


def estimate_lines(file: Path, sample_bytes: int = 1 << 20) -> float:
    """Estimates the number of lines from the size and the beginning of a file, for progress only."""
    try:
        with file.open("rb") as raw:
            text = (gzip.GzipFile(fileobj=raw) if is_gzip(file) else raw).read(sample_bytes)
            return max(1.0, text.count(b"\n") / max(1, raw.tell()) * file.stat().st_size)
    except (EOFError, OSError, zlib.error):
        return 1.0  # the error is reported when the file is read


def read_header(file: Path, delimiter: str, required: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the columns that the first line names."""
    try:
        with open_text(file) as opened:
            line = opened.readline(LONGEST_LINE_BYTES).rstrip(b"\r\n").decode(errors="replace")
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{file} line 1: the file is damaged or incomplete: {error}; get the file again") from None
    columns = tuple(line.split(delimiter))
    for name in required:
        if columns.count(name) != 1:
            raise ValueError(
                f"{file} line 1: must be a header with one column {name!r}, but the line is {line[:200]!r}; "
                "is it the published file?"
            )
    if len(set(columns)) < len(columns):
        raise ValueError(f"{file} line 1: a column is named twice in {line[:200]!r}")
    return columns


_GET_AGAIN = "get the file again"
_SAME_ENDS = "the engine needs the same line ends in all of a file: make them so, as with `tr '\\r' '\\n'`"
"""The blank lines that `tr` makes are ignored; `tr -d '\\r'` would join lines, and dos2unix leave some as they are."""


@dataclass(frozen=True)
class BadLine:
    number: int
    problem: str
    remedy: str = "correct it, or leave such lines out: --skip-bad"

    def __str__(self) -> str:
        return f"line {self.number}: {self.problem}; {self.remedy}"


def find_bad_line(file: Path, text_format: TextFormat, *, skip_bad: bool) -> BadLine | None:
    """Returns the first line that is an error. Slow, so only for files in which something is known to be wrong."""
    number, first_end, is_line_start = 0, b"", True
    try:
        with open_text(file) as opened:
            while line := opened.readline(LONGEST_LINE_BYTES + 2):
                text, end = _without_end(line)
                was_line_start, is_line_start = is_line_start, end != b""
                if not was_line_start:
                    continue  # the rest of a line that is too long
                number += 1
                first_end = first_end or end
                problem = _problem_of_end(text, end, first_end)
                if problem is not None:
                    return BadLine(number, problem, _SAME_ENDS)
                if skip_bad or (number == 1 and text_format.has_header):
                    continue
                problem = text_format.problem(text)
                if problem is not None:
                    return BadLine(number, problem)
    except EOFError:
        return BadLine(number + 1, "the gzip file ends in the middle, it is incomplete", _GET_AGAIN)
    except (OSError, zlib.error) as error:
        return BadLine(number + 1, f"the file is damaged: {error}", _GET_AGAIN)
    return None


def _without_end(line: bytes) -> tuple[bytes, bytes]:
    for end in (b"\r\n", b"\n"):
        if line.endswith(end):
            return line.removesuffix(end), end
    return line, b""


def _problem_of_end(text: bytes, end: bytes, first_end: bytes) -> str | None:
    """Returns what is wrong with a line's end. The engine cannot read beyond a place where line ends are mixed."""
    if b"\r" in text[:LONGEST_LINE_BYTES]:
        return "has a carriage return (\\r) without a line feed (\\n)"
    if end not in (first_end, b""):
        names = {b"\n": "\\n", b"\r\n": "\\r\\n"}
        return f"ends with {names[end]}, the lines before it with {names[first_end]}"
    return None


def _is_utf8(text: str) -> bool:
    """Returns whether text that was decoded with surrogateescape has none."""
    return all(not "\ud800" <= character <= "\udfff" for character in text)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _literal_path(file: Path) -> str:
    """Returns the path with the characters quoted that the engine would take as patterns."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in str(file))
