"""The README's figures of models: those of the result files, which are of whole runs."""

import json
from pathlib import Path

import pytest

from tests.test_repository import ROOT, results

README = ROOT / "README.md"
NAMES = {"hstu": "HSTU", "fuxi": "FuXi"}
LENGTHS = (512, 1024, 2048)
WAYS = (("inter", 1), ("nested", 8), ("intra", 8))


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


def test_readme_figures_of_data() -> None:
    readme = README.read_text().replace("\n", " ")
    prepared, killed = results("prepare.json")
    clicks, histories = results("reader.json")
    for text in (
        f"re-indexed at {prepared['prepare_vs_read']:.2f} of the speed",
        f"in at most {prepared['peak_rss_bytes'] / 1e9:.2f} GB; killed {killed['num_killed']} times",
        f"reads {clicks['reader_vs_demo']:.0f} times the clicks",
        f"{histories['reader_vs_demo']:.0f} times the histories",
    ):
        assert text in readme, text


def test_readme_figures_of_an_accelerator() -> None:
    readme = README.read_text().replace("\n", " ")
    records = {(r["schedule"], r["num_distinct"]): r for r in results("h200-one-rank.json") if "num_distinct" in r}
    serial, inter, nested = (records[schedule, 240_000] for schedule in ("serial", "inter", "nested"))
    ratios = [
        f"{records['nested', num_distinct]['step_over_dense_only']:.3f} and "
        f"{records['nested', num_distinct]['step_over_dense_unsplit']:.3f}"
        for num_distinct in (240_000, 120_000)
    ]
    models = {(r["model"], r["schedule"]): r for r in results("h200-models.json")}
    of_models = [nested, models["dlrm", "nested"], models["multi-hot-sgd", "nested"]]
    rows = [
        f"| {r['dense_unsplit_ms']:.1f} | {r['step_ms']:.1f} | {r['step_over_dense_unsplit']:.2f} |" for r in of_models
    ]
    stages = {name: value for record in results("h200-stages.json") for name, value in record.items()}
    for text in (
        *rows,
        f"in the same 8 micro-batches it is {nested['step_over_dense_only']:.3f}.",
        f"takes {serial['step_ms']:.0f} ms in serial, {inter['step_ms']:.0f} in inter,",
        f"{nested['step_ms']:.0f} in nested; the dense model alone takes {nested['dense_only_ms']:.0f} in the same",
        f"8 micro-batches and {nested['dense_unsplit_ms']:.0f} unsplit.",
        f"Nested takes {ratios[0]} times as long, with 120,000 rows {ratios[1]};",
        f"inter hides {inter['lookup_hidden_fraction']:.3f} of the lookup.",
        f"rows are retrieved at {stages['retrieve_vs_ceiling']:.2f} and",
        f"written back at {stages['write_back_vs_ceiling']:.2f} of",
        f"copied at {stages['overlap_sync_vs_copy']:.2f} of a plain copy's",
    ):
        assert text in readme, text


def test_readme_figures_of_ranks_on_one_accelerator() -> None:
    readme = README.read_text().replace("\n", " ")
    records = {
        (r["recipe"], r["schedule"], r["num_micro_batches"]): r
        for r in results("h200-four-ranks.json")
        if "schedule" in r and "recipe" in r
    }
    covered = [records["covered", schedule, 8] for schedule in ("nested", "intra")]
    waits = [f"{r['exposed_exchange_fraction']:.3f}" for r in covered]
    paid = [f"{r['exposed_exchange_end_to_end']:.2f}" for r in covered]
    slower = [f"{r['dense_slowdown']:.2f}" for r in covered]
    floor = (covered[0]["head_share"] + covered[0]["tail_share"]) / 2
    serial, pipelined = records["published", "serial", 1], records["published", "nested", 8]
    faster = [f"{records['published', *way]['speedup_vs_serial']:.2f}" for way in WAYS]
    for text in (
        f"nested waits for {waits[0]} of it and intra for {waits[1]};",
        f"the first rows and the last gradients, {floor:.3f}, have nothing to hide behind",
        f"End to end {paid[0]} and {paid[1]} of it",
        f"the dense part takes {slower[0]} and {slower[1]} times as long beside it",
        f"Where lookup takes {serial['lookup_share']:.2f} and exchange {serial['exchange_share']:.2f} of serial's step",
        f"inter is {faster[0]} times as fast as serial, nested {faster[1]} (published: 3.06), intra {faster[2]}",
        f"nested's dense part takes {pipelined['dense_slowdown']:.2f} times as long;",
    ):
        assert text in readme, text
