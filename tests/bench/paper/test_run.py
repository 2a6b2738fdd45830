"""A quick run of `bench paper`, and its refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.bench.harness.targets import find_misses, load_targets
from nestpipe.cli.bench import app
from tests.bench.network.test_network import leftovers, needs_hosts


@needs_hosts
@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    """Every table has records that say what they are, and all but the targets of four ranks are answered."""
    path = tmp_path / "paper.json"
    command = [sys.executable, "-m", "nestpipe", "bench", "paper", "--quick", "--json", str(path)]
    process = subprocess.Popen([*command, "--report", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    records = json.loads(path.read_text())["records"]
    assert list(dict.fromkeys(r["table"] for r in records)) == ["end_to_end", "micro_batches", "ranks", "robustness"]
    named = {"schedule", "num_micro_batches", "ranks", "threads", "dim", "batch_size", "seed", "compute", "rate"}
    for record in records:
        assert named <= set(record)
        assert all(isinstance(value, int | float | str) for value in record.values())
    assert [(r["schedule"], r["stale"]) for r in records if r["table"] == "end_to_end"] == [
        *(("serial", False), ("inter", True), ("inter", False), ("intra", False), ("nested", False))
    ]
    once = [r for r in records if r["table"] == "micro_batches" and r["window"] == "once"]
    assert {r["exchanged_bytes_vs_unsplit"] for r in once} == {1.0}
    misses = find_misses(load_targets("paper"), records)
    assert not [miss for miss in misses if "no record answers it" in miss and "ranks = 4" not in miss]
    assert (tmp_path / "paper.md").read_text().startswith("# The paper's tables")
    assert (tmp_path / "paper.svg").exists()
    assert leftovers(process.pid) == []


@needs_hosts
def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    options = ["--json", str(tmp_path / "x.json"), "--report", str(tmp_path / "nowhere")]
    done = CliRunner().invoke(app, ["paper", *options])
    assert done.exit_code == 2
    assert "of --report does not exist" in " ".join(done.output.replace("│", " ").split())
