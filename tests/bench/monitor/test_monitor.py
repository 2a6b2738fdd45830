"""`bench monitor`: one trial of each fault, on three hosts, each named and nothing else."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.bench.harness.targets import find_misses, load_targets
from nestpipe.bench.monitor.faults import KINDS
from nestpipe.bench.monitor.run import is_right
from nestpipe.cli.bench import app
from nestpipe.diagnosis.findings import Finding

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="makes network namespaces: needs root, ip and tc",
)


@needs_hosts
@pytest.mark.alone
@pytest.mark.timeout(180)
def test_each_fault_is_named(tmp_path: Path) -> None:
    """Fails if the recorder's clocks are not compared, or a link is measured while two hosts send over it. A rank with
    half the CPU can only be told from the others if nothing else needs the cores."""
    path = tmp_path / "monitor.json"
    done = CliRunner().invoke(app, ["monitor", "--quick", "--json", str(path)])
    assert done.exit_code == 0, done.output
    records = json.loads(path.read_text())["records"]
    trials = [record for record in records if "victim" in record]
    assert [record["fault"] for record in trials] == list(KINDS)
    assert {r["fault"]: r["named"] for r in trials if not r["is_right"]} == {}
    assert not [miss for miss in find_misses(load_targets("monitor"), records) if "no record answers it" in miss]


def test_what_is_right() -> None:
    """Fails if a second finding is allowed, or one of another rank."""
    disk = Finding("disk", (1,), 5.0, "")
    assert is_right("disk", 1, [disk])
    assert is_right("healthy", 1, [])
    assert not is_right("healthy", 1, [disk])
    assert not is_right("disk", 2, [disk])
    assert not is_right("cpu", 1, [disk])
    assert not is_right("disk", 1, [disk, Finding("link", (2,), 5.0, "")])


def test_mistakes() -> None:
    result = CliRunner().invoke(app, ["monitor", "--kind", "fire", "--json", "x.json"])
    assert result.exit_code == 2
