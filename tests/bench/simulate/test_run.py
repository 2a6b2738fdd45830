"""`bench simulate` as a whole: its records, and that each target has one. Needs root, for network namespaces."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.bench.harness.targets import find_misses, load_targets

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="makes network namespaces: needs root, ip and tc",
)


@needs_hosts
@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    """Fails if a way is not predicted, or is predicted from its own trace."""
    path = tmp_path / "simulate.json"
    command = [sys.executable, "-m", "nestpipe", "bench", "simulate", "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    assert not [miss for miss in find_misses(load_targets("simulate"), records) if "no record answers it" in miss]
    network = [record for record in records if record["table"] == "network"]
    for compute, error in (("paced", "step_error"), ("real", "unlimited_step_error")):
        made = {
            (r["schedule"], r["num_micro_batches"], r["cross_batch"]): r for r in network if r["compute"] == compute
        }
        plain = {("serial", 1), ("serial", 8), ("inter", 1), ("intra", 8), ("nested", 8)}
        assert set(made) == {(*way, False) for way in plain} | {("nested", 1, True), ("nested", 8, True)}
        for (schedule, _, cross_batch), record in made.items():
            assert ("key_overlap" in record) == cross_batch
            assert ("fit_error" if schedule == "serial" else error) in record
            assert record["predicted_step_ms"] > 0
