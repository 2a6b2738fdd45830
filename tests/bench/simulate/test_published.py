"""The published table: predictions from the rows of TorchRec alone, within the project's limits.

docs/simulator.md has the derivation.
"""

from pathlib import Path

import pytest

from nestpipe.bench.harness.targets import find_misses, load_targets
from nestpipe.bench.paper.published import NESTED
from nestpipe.bench.simulate.published import (
    FEW,
    MANY,
    Spread,
    published_cluster,
    published_records,
    result_of,
    torchrec_rows,
)
from nestpipe.bench.simulate.recorded import recorded_records
from nestpipe.prediction.ways import SCHEDULE_WAYS

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_the_cluster_has_the_rows_of_torchrec() -> None:
    """Fails if a part of the published step is counted twice, or the exchange grows otherwise than calibrated."""
    serial = SCHEDULE_WAYS[0]
    for workers, row in torchrec_rows().items():
        result = result_of(published_cluster(), workers, serial)
        assert result.step_ms == pytest.approx(row.step_ms, rel=1e-9)
        assert result.parts["exposed_lookup_ms"] == pytest.approx(row.lookup_ms, rel=1e-9)
        assert result.parts["exposed_exchange_ms"] == pytest.approx(row.exchange_ms, rel=1e-9)
    rows = torchrec_rows()
    assert rows[FEW].step_ms / rows[MANY].step_ms == pytest.approx(0.4434)


def test_published_systems_are_predicted() -> None:
    """Step within 5%, efficiency within 2 points: the limits of benchmarks/targets.toml."""
    records = [record for record in published_records() if record["table"] == "published"]
    systems = {str(record["system"]) for record in records}
    assert {"UniEmb, stale prefetch", "NestPipe", "NestPipe + 2D sparse parallel"} <= systems
    targets = [target for target in load_targets("simulate") if target.field.startswith("published")]
    assert len(targets) == 2
    assert find_misses(targets, records) == []


def test_no_lane_of_the_lookup_is_longer_than_the_published_step() -> None:
    """The published look-up is longer than NestPipe's whole step, so it must be on several lanes."""
    lookup_ms = torchrec_rows()[MANY].lookup_ms
    assert lookup_ms > NESTED.step_ms
    lanes = Spread().of(lookup_ms)
    assert sum(lanes.values()) == pytest.approx(lookup_ms)
    assert max(lanes.values()) <= NESTED.step_ms
    assert lanes["gather"] + lanes["copy"] <= NESTED.step_ms  # our host lane does both


def test_additions_help() -> None:
    """Sharding groups do not on this cluster, where no two workers share keys."""
    steps = {r["addition"]: float(r["predicted_step_ms"]) for r in published_records() if r["table"] == "additions"}
    alone = [step for name, step in steps.items() if "groups" not in name]
    assert len(alone) >= 3
    assert alone == sorted(alone, reverse=True)
    assert steps["groups"] > steps["cross-batch"]


def test_runs_on_record_are_predicted() -> None:
    records = list(recorded_records(RESULTS))
    limited = [record for record in records if "step_error" in record]
    assert len(limited) >= 6
    targets = [target for target in load_targets("simulate") if target.field == "step_error"]
    assert find_misses(targets, limited) == []
    assert all("unlimited_step_error" in record for record in records if record["ranks"] == 4)
