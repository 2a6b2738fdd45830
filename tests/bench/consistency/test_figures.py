"""The plot and the table of `bench consistency`: on made-up records, and in docs/ those of the committed result."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from nestpipe.bench.consistency.figures import METRICS, plot, table
from nestpipe.bench.harness.report import Record, load_records

ROOT = Path(__file__).parents[3]
SERIAL = {"hr_10": 0.125, "hr_50": 0.25, "ndcg_10": 0.0625, "ndcg_50": 0.09375}


def record(
    seed: int, schedule: str, stale: bool = False, less: Mapping[str, float] = {}, digest: str = "aa" * 32
) -> Record:
    metrics = {name: value + less.get(name, 0.0) for name, value in SERIAL.items()}
    run = {"seed": seed, "schedule": schedule, "stale": stale, "ranks": 3, "steps": 7, "digest": digest}
    return {**run, "final_loss": 1.5 + seed, **metrics}


def whole_run() -> list[Record]:
    return [
        *(record(1, schedule) for schedule in ("serial", "inter", "intra", "nested")),
        record(1, "nested", True, {"hr_10": -(2**-9)}, "bb" * 32),
        record(2, "serial"),
        record(2, "nested", True, {"hr_50": 2**-10}, "cc" * 32),
    ]


def test_plot_names_and_counts() -> None:
    """Fails if runs with stale rows are drawn like the others of their schedule."""
    svg = plot(whole_run())
    names = re.findall(r'text-anchor="start">([^<]+)<', svg)
    assert names == [
        "inter, seed 1",
        "intra, seed 1",
        "nested, seed 1",
        "nested, stale rows, seeds 1, 2 from left to right",
    ]
    assert svg.count("<path") == len(names) + len(METRICS) * 5
    assert "HSTU, 3 ranks, 7 steps" in svg
    assert "difference from serial, in 1e-3" in svg


def test_differences_are_from_serial_of_the_same_seed() -> None:
    """Fails if every seed is compared with the first serial."""
    other = {**record(2, "serial", less={"hr_10": 0.5})}
    stale = record(2, "nested", True, {"hr_10": 0.5 - 2**-9})
    text = table([record(1, "serial"), other, stale])
    assert text.splitlines()[-1].startswith("| 2 | nested, stale rows | 0.62305 (-1.95) | 0.25000 (0) |")


def test_table() -> None:
    """Fails if a difference that only rounds to zero is written as 0."""
    records = [record(1, "serial"), record(1, "inter", less={"ndcg_10": 1e-7})]
    assert table(records).splitlines() == [
        "| seed | schedule | HR@10 | HR@50 | NDCG@10 | NDCG@50 | final loss | digest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 1 | serial | 0.12500 | 0.25000 | 0.06250 | 0.09375 | 2.50000 | aaaaaaaa |",
        "| 1 | inter | 0.12500 (0) | 0.25000 (0) | 0.06250 (+0.00) | 0.09375 (0) | 2.50000 | aaaaaaaa |",
    ]


def test_records_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="no record of serial with seed 2"):
        plot([record(1, "serial"), record(2, "nested", True)])
    for records in ([], [record(1, "serial")]):
        with pytest.raises(ValueError, match="no run to compare with serial"):
            plot(records)
    with pytest.raises(ValueError, match=r"inter, seed 1, HR@50: nan has no place in a plot"):
        plot([record(1, "serial"), record(1, "inter", less={"hr_50": float("nan")})])


def test_documents_show_the_committed_result() -> None:
    """If it fails, run `nestpipe bench redraw benchmarks/results/consistency.json --plot docs/consistency.svg`."""
    records = load_records(ROOT / "benchmarks" / "results" / "consistency.json", "consistency")
    assert (ROOT / "docs" / "consistency.svg").read_text() == plot(records)
    assert f"\n\n{table(records)}\n\n" in (ROOT / "docs" / "consistency.md").read_text()
