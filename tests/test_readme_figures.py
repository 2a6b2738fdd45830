"""The figures in the documents are those of benchmarks/results; sentences may say what they like."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.bench.harness.documents import FigureError, names_a_result, refreshed, tables
from nestpipe.cli.main import app

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_figures_are_those_of_the_results(document: Path) -> None:
    """`nestpipe bench report` writes them."""
    text = document.read_text()
    assert refreshed(text, RESULTS) == text


def test_the_readme_has_no_other_figures() -> None:
    readme = list(tables((ROOT / "README.md").read_text()))
    assert len(readme) > 0
    assert [table[0] for table in readme if not names_a_result(table)] == []


@pytest.mark.parametrize(
    ("row", "right"),
    [
        ("| gather, `gather_vs_index_select` `dim=64` `ranks=1` | 0.98 | 1.05 |", None),
        ("| gather, `gather_vs_index_select` `dim=64` `ranks=1` | 0.98 | |", None),
        (
            "| gather, `gather_vs_index_select` `dim=64` `ranks=1` | 0.99 | 1.2 |",
            "| gather, `gather_vs_index_select` `dim=64` `ranks=1` | 0.98 | 1.1 |",
        ),
        (
            "| gather, `gather_vs_index_select` `dim=64` `ranks=1` | 0.99 | |",
            "| gather, `gather_vs_index_select` `dim=64` `ranks=1` | 0.98 | |",
        ),
        ("| gather, `gather_vs_index_select` `dim=64` | 0.98 | 1.05 |", "0.98"),
        ("| gather, `gather_vs_index_select` `dim=65` `ranks=1` | 0.98 | 1.05 |", "0.98"),
        ("| gather `dim=64` `ranks=1` | 0.98 | 1.05 |", "0.98"),
        ("| memory, `overhead_bytes_per_row` | | 31.3 bytes |", None),
        ("| memory, `overhead_bytes_per_row` | | 31.3 miles |", "31.3 miles"),
    ],
)
def test_a_wrong_figure_is_found(row: str, right: str | None) -> None:
    """On rows that are right, wrong, of several records, of none, and without a field or a known unit.

    right: the row as it must be, or the cell that has no source; None if the row is right.
    """
    head = "| `store.json` | `threads=1` | `threads=2` |\n| --- | --- | --- |\n"
    text = f"before\n\n{head}{row}\n\n| other | table |\n| --- | --- |\n| 1 | 2 |\n"
    if right is None or right.startswith("|"):
        assert refreshed(text, RESULTS) == text.replace(row, right or row)
    else:
        with pytest.raises(FigureError, match=right):
            refreshed(text, RESULTS)


def test_bench_report(tmp_path: Path) -> None:
    """Fails if `report --check` writes, or if `report` does not name what it has changed."""
    document = tmp_path / "a.md"
    head = "| `store.json` `threads=1` `ranks=1` | figure |\n| --- | --- |\n"
    document.write_text(f"{head}| gather, `gather_vs_index_select` `dim=64` | 7.77 |\n")
    checked = CliRunner().invoke(app, ["bench", "report", str(document), "--check"])
    assert (checked.exit_code, "7.77" in document.read_text()) == (1, True)
    assert "a.md has other figures than benchmarks/results" in checked.output.replace("\n", " ")
    done = CliRunner().invoke(app, ["bench", "report", str(document)])
    assert (done.exit_code, "0.98" in document.read_text()) == (0, True)
    assert CliRunner().invoke(app, ["bench", "report", str(document), "--check"]).exit_code == 0


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_results_are_of_whole_runs(file: Path) -> None:
    assert json.loads(file.read_text())["quick"] is False
