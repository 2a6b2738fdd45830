"""`bench exchange` as a whole: its records; each target has one. Part link needs root, for network namespaces."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.bench.exchange.link_loop import RANKS_PER_HOST
from nestpipe.bench.harness.targets import find_misses, load_targets
from tests.bench.simulate.test_run import needs_hosts


def records_of(part: str, folder: Path) -> list[dict]:
    path = folder / "exchange.json"
    command = [sys.executable, "-m", "nestpipe", "bench", "exchange", "--quick", "--part", part, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    misses = find_misses(load_targets(f"exchange-{part}"), records)
    assert not [miss for miss in misses if "no record answers it" in miss]
    return records


@needs_hosts
@pytest.mark.slow
def test_link(tmp_path: Path) -> None:
    """Bytes are right even in a quick run. Fails if row_dtype or gradient_dtype is ignored, if owners send no sums, or
    if a Loop does not hand `replicas` or `hosts` to its World, or if `where` of a pooled feature is ignored."""
    records = records_of("link", tmp_path)
    forms = [record for record in records if record["part"] == "forms"]
    expected = {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5, "int8": (4 + 64) / (4 * 64)}
    for field in ("row_bytes_vs_float32", "gradient_bytes_vs_float32"):
        assert {record["row_dtype"]: record[field] for record in forms} == expected
    placements = {record["placement"]: record for record in records if record["part"] == "placements"}
    assert placements["sharded"]["link_bytes_vs_sharded"] == 1
    assert placements["replicated"]["exchanged_row_bytes_per_step"] == 0
    assert 0.9 < placements["replicated"]["link_bytes_vs_sharded"] <= 1.05
    flat, groups = (record for record in records if record["part"] == "groups")
    assert flat["link_row_bytes"] == flat["link_gradient_bytes"] > flat["link_sum_bytes"] == 0
    assert groups["link_sum_bytes"] > groups["link_row_bytes"] == groups["link_gradient_bytes"] == 0
    for record in (flat, groups):
        planned = record["link_row_bytes"] + record["link_gradient_bytes"] + record["link_sum_bytes"]
        assert record["link_bytes"] > RANKS_PER_HOST * planned
    flat, hops = (next(r for r in records if r.get("hops") == number) for number in (1, 2))
    assert flat["link_bytes_vs_flat"] == 1
    assert hops["union_share"] - 0.1 < hops["link_bytes_vs_flat"] < hops["union_share"] + 0.1
    poolings = {record["pooled_at"]: record for record in records if record["part"] == "poolings"}
    assert poolings["requester"]["link_bytes_vs_rows"] == 1
    assert poolings["owner"]["link_bytes_vs_rows"] <= 0.5


@pytest.mark.slow
def test_quality(tmp_path: Path) -> None:
    """Fails if the difference is taken from other seeds."""
    plain, *rounded = records_of("quality", tmp_path)
    assert plain["hr_10_distance"] == plain["hr_10_largest_distance"] == 0
    for record in rounded:
        differences = [record[name] - plain[name] for name in plain if name.startswith("hr_10_seed")]
        assert len(differences) == 3
        assert record["hr_10_minus_float32"] == pytest.approx(sum(differences) / 3)
