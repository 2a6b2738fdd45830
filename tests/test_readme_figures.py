"""The README's figures of models: those of the result files, which are of whole runs."""

import json
from pathlib import Path

import pytest

from tests.test_repository import ROOT, results

README = ROOT / "README.md"
NAMES = {"hstu": "HSTU", "fuxi": "FuXi"}
LENGTHS = (512, 1024, 2048)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda file: file.name)
def test_results_are_of_whole_runs(file: Path) -> None:
    assert json.loads(file.read_text())["quick"] is False


def test_readme_figures_of_learning() -> None:
    """Row by row: who ranks how well, the ratios that have targets, and what training took."""
    readme = README.read_text()
    records = {r["model"]: r for r in results("learning.json")}
    assert set(records) == set(NAMES)
    for model, r in records.items():
        rates = [r[field] for field in ("hr_10", "popularity_hr_10", "bigram_hr_10", "oracle_hr_10")]
        ratios = [r[f"hr10_vs_{other}"] for other in ("popularity", "bigram", "oracle")]
        cells = [*(f"{rate:.3f}" for rate in rates), *(f"{ratio:.2f}" for ratio in ratios)]
        row = f"| {NAMES[model]} | {' | '.join(cells)} | {r['steps']:,} steps, {r['seconds']:.0f} s |"
        assert row in readme, row
    hstu, fuxi = records["hstu"], records["fuxi"]
    for text in (
        f"one rank, {hstu['threads']} threads, on synthetic histories",
        f"targets of {hstu['num_held_out']:,} held-out users are ranked among {hstu['num_items']:,} items",
        f"differs by {hstu['loss_difference']:.1g} (HSTU) and {fuxi['loss_difference']:.1g} (FuXi) of it",
    ):
        assert text in readme.replace("\n", " "), text


def test_readme_figures_of_attention() -> None:
    readme = README.read_text()
    records = {(r["method"], r["form"], r["length"]): r for r in results("attention.json")}
    assert {length for *_, length in records} == set(LENGTHS)
    for method, name in NAMES.items():
        for form in ("blocked", "plain"):
            bytes_a_token = [records[method, form, length]["peak_bytes_per_token"] for length in LENGTHS]
            cells = " | ".join(f"{value / 1024:.1f}" for value in bytes_a_token)
            assert f"| {name}, {form}, KiB a token | {cells} |" in readme
        speeds = [records[method, "blocked", length]["speed_vs_plain"] for length in LENGTHS]
        assert f"| {name}, speed | {' | '.join(f'{speed:.2f}' for speed in speeds)} |" in readme
    hstu, fuxi = (records[method, "blocked", 2048] for method in NAMES)
    growth = [r["peak_bytes_per_token_vs_512"] for r in (hstu, fuxi)]
    for text in (
        f"attention on {hstu['num_tokens']:,} tokens, one thread",
        f"the median of {hstu['num_pairs']} pairs",
        f"needs {growth[0]:.2f} (HSTU) and {growth[1]:.2f} (FuXi) times the memory",
    ):
        assert text in readme.replace("\n", " "), text
