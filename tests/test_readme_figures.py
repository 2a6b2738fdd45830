"""The figures in the documents are those of benchmarks/results; sentences may say what they like.

A table is checked if one of its cells names a result file. Code spans say which records a number comes from:

    | `store.json` `dim=64`                 | one thread `threads=1` | two threads `threads=2` |
    | ------------------------------------- | ---------------------- | ----------------------- |
    | how fast it is, `gather_vs_index_select` | 0.98                | 1.05                    |

A number belongs to the file, the field and the conditions that stand in the first cell of the header, in the header of
its column, and in its row. All records that have the field and meet the conditions must show this number.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = re.compile(r"(-?[\d,]+(?:\.(\d+))?)(?: (\S+))?")
UNITS = {"": 1, "ms": 1, "s": 1, "bytes": 1, "steps": 1, "KiB": 2**10, "GB": 10**9}

Table = list[list[str]]


@dataclass(frozen=True)
class Source:
    """Where a number comes from: what the code spans around it say."""

    files: tuple[str, ...]
    words: tuple[str, ...]
    """one of them is a field of the file's records"""
    conditions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, cells: list[str]) -> "Source":
        spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
        conditions = [match.groups() for span in spans if (match := re.fullmatch(r"(\w+)=(\S+)", span))]
        files = tuple(span for span in spans if span.endswith(".json"))
        words = tuple(span for span in spans if re.fullmatch(r"\w+", span))
        return cls(files, words, tuple((name, value) for name, value in conditions))

    def values(self) -> list[float]:
        """Returns the numbers of all records that match; none unless one file and one field are named."""
        if len(self.files) != 1:
            return []
        records = json.loads((RESULTS / self.files[0]).read_text())["records"]
        fields = [word for word in self.words if any(word in record for record in records)]
        matching = [r for r in records if all(str(r.get(name)) == value for name, value in self.conditions)]
        return [record[fields[0]] for record in matching if fields[0] in record] if len(fields) == 1 else []


def tables(text: str) -> Iterator[Table]:
    for block in re.findall(r"^\|.*\|\n\|[ |:-]+\|\n(?:\|.*\|\n?)+", text, re.MULTILINE):
        header, _, *rows = block.strip().splitlines()
        yield [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *rows)]


def names_a_result(table: Table) -> bool:
    return any(Source.of(row).files for row in table)


def mistakes(table: Table) -> list[str]:
    """Returns what is wrong in a table, a line for each number."""
    header, *rows = table
    wrong = []
    for row in rows:
        for column, cell in enumerate(row[1:], 1):
            if cell and "`" not in cell:
                source = Source.of([header[0], header[column], *row])
                if not is_shown(cell, source):
                    wrong.append(f"{row[0]} | {cell}: {source}")
    return wrong


def is_shown(cell: str, source: Source) -> bool:
    number = NUMBER.fullmatch(cell)
    if number is None or (number[3] or "") not in UNITS:
        return False
    unit, decimals = UNITS[number[3] or ""], len(number[2] or "")
    return {f"{value / unit:,.{decimals}f}" for value in source.values()} == {number[1]}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_figures_are_those_of_the_results(document: Path) -> None:
    checked = [table for table in tables(document.read_text()) if names_a_result(table)]
    assert [line for table in checked for line in mistakes(table)] == []


def test_the_readme_has_no_other_figures() -> None:
    readme = list(tables((ROOT / "README.md").read_text()))
    assert len(readme) > 0
    assert [table[0] for table in readme if not names_a_result(table)] == []


@pytest.mark.parametrize(
    ("row", "is_right"),
    [
        ("| gather, `gather_vs_index_select` `dim=64` `ranks=1` | 0.98 | 1.05 |", True),
        ("| gather, `gather_vs_index_select` `dim=64` `ranks=1` | 0.98 | |", True),
        ("| gather, `gather_vs_index_select` `dim=64` `ranks=1` | 0.99 | 1.05 |", False),
        ("| gather, `gather_vs_index_select` `dim=64` | 0.98 | 1.05 |", False),
        ("| gather, `gather_vs_index_select` `dim=65` `ranks=1` | 0.98 | 1.05 |", False),
        ("| gather `dim=64` `ranks=1` | 0.98 | 1.05 |", False),
        ("| memory, `overhead_bytes_per_row` | | 31.3 bytes |", True),
        ("| memory, `overhead_bytes_per_row` | | 31.3 miles |", False),
    ],
)
def test_a_wrong_figure_is_found(row: str, is_right: bool) -> None:
    """On rows that are right, wrong, of several records, of none, and without a field or a known unit."""
    text = f"| `store.json` | `threads=1` | `threads=2` |\n| --- | --- | --- |\n{row}\n"
    ((header, *rows),) = tables(text)
    assert (mistakes([header, *rows]) == []) is is_right


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_results_are_of_whole_runs(file: Path) -> None:
    assert json.loads(file.read_text())["quick"] is False
