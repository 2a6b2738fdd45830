"""Cluster files: what is refused, and where the defaults come from."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from nestpipe.recipe.value import ConfigError
from nestpipe.simulator.cluster import ByWorkersSection, Cluster
from nestpipe.simulator.cluster_text import describe, load_cluster, parse_cluster

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[network]\nincats = 1", r"unknown key network.incats in a.toml; did you mean network.incast\?"),
        ("[netwrk]\nincast = 1", r"unknown section \"netwrk\" in a.toml; did you mean network\?"),
        ("network = 1", r"network in a.toml is 1 \(an integer\), must be a section: write \[network\]"),
        ("[pool]\nhit_rate = 1.5", "pool.hit_rate in a.toml is 1.5, must be at least 0 and at most 1"),
        ("[pool]\nhit_rate = 'x'", 'pool.hit_rate in a.toml is "x" .a string., must be a number'),
        ("[batch]\nwindow = 'twice'", 'batch.window in a.toml is "twice", must be one of once, resend'),
        ("[by_workers]\nworkers = [1, 2]", "by_workers.dedup_ms in a.toml has 5 numbers, by_workers.workers has 2"),
        ("[run]\nworkers = []", "run.workers in a.toml is empty"),
        ("[run", "a.toml is not valid TOML"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_cluster(text, "a.toml")


def test_workers_must_ascend() -> None:
    section = {field.name: "[1, 1]" for field in fields(ByWorkersSection)} | {"workers": "[4, 2]"}
    text = "[by_workers]\n" + "\n".join(f"{name} = {value}" for name, value in section.items())
    with pytest.raises(ConfigError, match=r"by_workers.workers in a.toml must ascend"):
        parse_cluster(text, "a.toml")


def test_files(tmp_path: Path) -> None:
    assert load_cluster(None) == Cluster()
    path = tmp_path / "cluster.toml"
    path.write_text("[dense]\nms = 7\n")
    assert load_cluster(path).dense.ms == 7.0
    with pytest.raises(ConfigError, match="cannot read"):
        load_cluster(tmp_path / "none.toml")


def test_every_key_is_described() -> None:
    rows = describe()
    assert len(rows) == sum(len(fields(type(getattr(Cluster(), section.name)))) for section in fields(Cluster))
    assert all(meaning for *_, meaning in rows)


def test_planning_is_what_bench_scale_measured() -> None:
    """Fails if benchmarks/results/scale.json is measured again, and the defaults stay behind by more than a half."""
    records = json.loads((ROOT / "benchmarks/results/scale.json").read_text())["records"]
    section = Cluster().by_workers
    for number, dedup_ms, route_ms in zip(section.workers, section.dedup_ms, section.route_ms, strict=True):
        (record,) = (r for r in records if (r["ranks"], r["tables"], r["num_micro_batches"]) == (number, 26, 1))
        assert record["num_keys"] == Cluster().host.planning_keys
        assert dedup_ms == pytest.approx(record["dedup_ms"], rel=0.5)
        assert route_ms == pytest.approx(record["route_ms"] + record["plan_ms"], rel=0.5)
