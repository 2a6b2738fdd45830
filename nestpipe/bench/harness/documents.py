"""Figures in documents: every number of a table comes from a result file, and is written anew from it.

A table belongs to a result if one of its cells names a result file. Code spans say which records a number comes from:

    | `store.json` `dim=64`                 | one thread `threads=1` | two threads `threads=2` |
    | ------------------------------------- | ---------------------- | ----------------------- |
    | how fast it is, `gather_vs_index_select` | 0.98                | 1.05                    |

A number belongs to the file, the field and the conditions that stand in the first cell of the header, in the header of
its column, and in its row. All records that have the field and meet the conditions must show the same number. Its unit
and its decimals stay as they are. Sentences may say what they like.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NUMBER = re.compile(r"(-?[\d,]+(?:\.(\d+))?)(?: (\S+))?")
UNITS = {"": 1, "ms": 1, "s": 1, "bytes": 1, "steps": 1, "KiB": 2**10, "MB": 10**6, "GB": 10**9}
_TABLE = re.compile(r"^\|.*\|\n\|[ |:-]+\|\n(?:\|.*\|\n?)+", re.MULTILINE)


class FigureError(ValueError):
    """A number of a table has no source, several, or an unknown unit."""


@dataclass(frozen=True)
class Source:
    """Where a number comes from: what the code spans around it say."""

    files: tuple[str, ...]
    words: tuple[str, ...]
    """One of them is a field of the file's records."""
    conditions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, cells: list[str]) -> "Source":
        spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
        conditions = [match.groups() for span in spans if (match := re.fullmatch(r"(\w+)=(\S+)", span))]
        files = tuple(span for span in spans if span.endswith(".json"))
        words = tuple(span for span in spans if re.fullmatch(r"\w+", span))
        return cls(files, words, tuple((name, value) for name, value in conditions))

    def values(self, results: Path) -> list[float]:
        """Returns the numbers of all records that match; none unless one file and one field are named."""
        if len(self.files) != 1:
            return []
        records = json.loads((results / self.files[0]).read_text())["records"]
        fields = [word for word in self.words if any(word in record for record in records)]
        matching = [r for r in records if all(str(r.get(name)) == value for name, value in self.conditions)]
        return [record[fields[0]] for record in matching if fields[0] in record] if len(fields) == 1 else []


def tables(text: str) -> Iterator[list[list[str]]]:
    """Returns the cells of all tables, the header first."""
    for block in _TABLE.findall(text):
        header, _, *rows = block.strip().splitlines()
        yield [_cells(line) for line in (header, *rows)]


def names_a_result(table: list[list[str]]) -> bool:
    return any(Source.of(row).files for row in table)


def refreshed(text: str, results: Path) -> str:
    """Returns a document with all figures as they are in the results."""
    return _TABLE.sub(lambda match: _refreshed_table(match[0], results), text)


def _refreshed_table(block: str, results: Path) -> str:
    if not names_a_result([_cells(line) for line in block.strip().splitlines()]):
        return block
    header, line, *rows = block.splitlines(keepends=True)
    return "".join([header, line, *(_refreshed_row(_cells(header), row, results) for row in rows)])


def _refreshed_row(header: list[str], line: str, results: Path) -> str:
    row = _cells(line)
    for column, cell in enumerate(row[1:], 1):
        if cell and "`" not in cell:
            figure = figure_like(cell, Source.of([header[0], header[column], *row]), results)
            if figure != cell:
                row[column] = figure
    new = "| " + " | ".join(row) + " |" + line[len(line.rstrip("\n")) :]
    return line if _cells(line) == row else new.replace("|  |", "| |")


def figure_like(cell: str, source: Source, results: Path) -> str:
    """Returns the figure of a source, with the unit and the decimals that the cell has now."""
    number = NUMBER.fullmatch(cell)
    if number is None or (number[3] or "") not in UNITS:
        raise FigureError(f"{cell!r} is not a number with one of the units {', '.join(filter(None, UNITS))}")
    unit, decimals = number[3] or "", len(number[2] or "")
    figures = {f"{value / UNITS[unit]:,.{decimals}f}" for value in source.values(results)}
    if len(figures) != 1:
        raise FigureError(f"{cell!r} must come from one number, there are {sorted(figures)}: {source}")
    return f"{figures.pop()} {unit}".rstrip()


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
