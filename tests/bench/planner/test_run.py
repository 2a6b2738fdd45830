"""`bench planner` as a whole: its records, and that its target has one of each workload. Needs root."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.bench.harness.targets import find_misses, load_targets
from nestpipe.bench.planner.workloads import WORKLOADS
from nestpipe.prediction.choose import CANDIDATES

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="makes network namespaces: needs root, ip and tc",
)


@needs_hosts
@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    """Fails if a number is not measured, or if the chosen number is compared with itself."""
    path = tmp_path / "planner.json"
    command = [sys.executable, "-m", "nestpipe", "bench", "planner", "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    assert not [miss for miss in find_misses(load_targets("planner"), records) if "no record answers it" in miss]
    for workload in WORKLOADS:
        mine = [record for record in records if record["workload"] == workload.name]
        fixed = {record["num_micro_batches"]: record for record in mine if record["table"] == "fixed"}
        (auto,) = [record for record in mine if record["table"] == "auto"]
        assert tuple(fixed) == CANDIDATES
        assert all(record["predicted_step_ms"] > 0 for record in fixed.values())
        assert auto["step_ms"] == fixed[auto["num_micro_batches"]]["step_ms"]
        assert fixed[auto["best_num_micro_batches"]]["step_ms"] == min(record["step_ms"] for record in fixed.values())
        ratio = auto["step_ms"] / fixed[auto["best_num_micro_batches"]]["step_ms"]
        assert auto["auto_over_best"] == pytest.approx(ratio)  # of one round
