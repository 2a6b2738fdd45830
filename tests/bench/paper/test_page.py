"""The page of `bench paper`: its tables, and that docs/ has the one of the results on record."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.bench.harness.documents import tables
from nestpipe.bench.harness.report import Record
from nestpipe.bench.paper.page import Figures, files, picture, text
from nestpipe.bench.paper.published import COUNTERPARTS, NESTED, counterpart
from nestpipe.cli.bench import app

ROOT = Path(__file__).parents[3]


def end_to_end(schedule: str, stale: bool, **more: float) -> Record:
    return {"table": "end_to_end", "schedule": schedule, "stale": stale, "ranks": 2, **more}


def rank_records() -> list[Record]:
    times = {1: 500.0, 2: 400.0, 4: 1000.0}
    return [
        {
            **{"table": "ranks", "schedule": "nested", "stale": False, "ranks": ranks, "paced_ms": 400.0},
            **{"step_ms": step_ms, "scaling_efficiency": 500.0 / step_ms},
        }
        for ranks, step_ms in times.items()
    ]


def split_record(num_micro_batches: int) -> Record:
    return {
        **{"table": "micro_batches", "num_micro_batches": num_micro_batches, "window": "resend", "method": "none"},
        **{"micro_batch_size": 512 // num_micro_batches, "exchanged_bytes_vs_unsplit": 1.5},
    }


def robustness_record(varied: str, **more: float) -> Record:
    return {"table": "robustness", "varied": varied, "dim": 128, "num_layers": 4, "length": 128, **more}


MEASURED = [
    end_to_end("serial", False, step_ms=900.0),
    end_to_end("inter", True, step_ms=450.0, speedup_vs_serial=2.0),
    end_to_end("inter", False, step_ms=500.0, speedup_vs_serial=1.8),
    end_to_end("nested", False, step_ms=300.0, speedup_vs_serial=3.0, exposed_lookup_fraction=0.0625),
    *rank_records(),
    split_record(1),
    split_record(32),
    robustness_record("base", step_over_dense_unsplit=1.25),
    robustness_record("dim", dim=192, step_over_dense_unsplit=1.5, step_over_dense_unsplit_less_base=0.25),
]
ON_H200 = [robustness_record("dim", dim=768, step_over_dense_unsplit=1.125, robustness_difference=-0.002)]


def rows_of(figures: Figures, number: int) -> dict[str, list[str]]:
    """Returns the rows of a table by their first cell."""
    header, *rows = list(tables(text(figures)))[number]
    assert all(len(row) == len(header) for row in rows)
    return {row[0]: row[1:] for row in rows}


def test_a_published_row_stands_next_to_its_counterpart() -> None:
    """Fails if stale and exact rows of inter are mixed up."""
    rows = rows_of(Figures(MEASURED), 0)
    assert rows["TorchRec"][:5] == ["serial", "5,794 ms", "1.00", "900 ms", "1.00"]
    assert rows["UniEmb, stale prefetch"][:5] == ["inter, stale rows", "2,920 ms", "1.98", "450 ms", "2.00"]
    assert rows["inter-batch pipeline alone"][3:5] == ["500 ms", "1.80"]
    assert rows["NestPipe"][2:5] == ["3.06", "300 ms", "3.00"]
    assert rows["2D sparse parallel"][3:7] == [""] * 4
    assert all(row[-1] for row in rows.values())  # what differs


def test_other_tables() -> None:
    figures = Figures(MEASURED, robustness=ON_H200)
    assert rows_of(figures, 1)["lookup alone"] == ["1.02", "", "1.25", ""]
    assert rows_of(figures, 2)["nested"][:2] == ["0.011", "0.062"]
    assert rows_of(figures, 3)["512, unsplit"][:3] == ["", "", "1.500"]
    assert rows_of(figures, 3)["16"][:3] == ["given", "resend", "1.500"]
    _, base, dim, *_ = list(tables(text(figures)))[4]
    assert base[2:4] == ["128 / 4 / 128", "1.25"]
    assert dim == ["row dim", "512 to 1,024", "192", "1.50", "+0.250", "", "768", "1.12", "-0.002"]
    assert rows_of(figures, 5)["nested"] == ["0.94", "500 ms", "400 ms", "1,000 ms", "1.25", "0.50"]


def test_the_picture_shows_what_there_is() -> None:
    marks = {len(records): picture(Figures(records)).count("<path") for records in ([], MEASURED)}
    assert marks == {0: 4 + 1, len(MEASURED): 4 + 3 + 2}  # with those of the legend


def test_every_published_row_has_a_counterpart_of_its_own() -> None:
    assert len({(system.schedule, system.stale) for system in COUNTERPARTS}) == len(COUNTERPARTS)
    assert counterpart("nested", False) is NESTED
    assert NESTED.speedup == pytest.approx(3.06, abs=0.005)
    assert {system.name: round(system.speedup, 2) for system in COUNTERPARTS[1:3]} == {
        "UniEmb, stale prefetch": 1.98,
        "inter-batch pipeline alone": 1.99,
    }


@pytest.mark.parametrize("name", ["paper.md", "paper.svg"])
def test_the_page_in_docs_is_current(name: str) -> None:
    """`nestpipe bench report` writes it."""
    assert (ROOT / "docs" / name).read_text() == files()[name]


def test_bench_report_checks_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestpipe.bench.paper.page.text", lambda figures: "another page")
    checked = CliRunner().invoke(app, ["report", "--check"])
    assert checked.exit_code == 1
    assert re.search(r"paper\.md\s+has\s+other\s+figures", checked.output)
