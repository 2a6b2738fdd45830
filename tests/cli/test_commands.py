"""Version, help, mistakes, and quick runs of benchmarks, as a user calls them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nestpipe
from nestpipe.bench.harness.targets import find_misses, load_targets
from nestpipe.cli.main import app
from nestpipe.pipelining.schedule import SCHEDULES


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nestpipe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def quick_records(name: str, folder: Path) -> list[dict]:
    """Returns the records of a quick run. Every target must apply to a record, met or not."""
    path = folder / f"{name}.json"
    done = run("bench", name, "--quick", "--json", str(path))
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    assert not [miss for miss in find_misses(load_targets(name), records) if "no record answers it" in miss]
    return records


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == f"nestpipe {nestpipe.__version__}"
    texts = [CliRunner().invoke(app, [*command, "--help"]).stdout for command in ((), ("bench", "store"))]
    assert "bench" in texts[0]
    assert all(option in texts[1] for option in ("--json", "--quick", "--check"))


@pytest.mark.slow
def test_bench_store_quick(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    done = run("bench", "store", "--quick", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert set(result) == {"bench", "version", "quick", "environment", "records"}
    assert (result["bench"], result["version"], result["quick"]) == ("store", nestpipe.__version__, True)
    assert {"cpu", "cores", "torch", "load_before", "load_after", "busy"} <= set(result["environment"])
    for record in result["records"]:
        assert all(isinstance(value, int | float | str) for value in record.values())
    misses = find_misses(load_targets("store"), result["records"])
    assert not [miss for miss in misses if "no record answers it" in miss]


@pytest.mark.slow
def test_bench_schedules_quick(tmp_path: Path) -> None:
    records = quick_records("schedules", tmp_path)
    traffic = {r["overlap"]: r["host_traffic_vs_serial"] for r in records if "host_traffic_vs_serial" in r}
    assert traffic == {0.0: 1.0, 0.6: pytest.approx(0.4, abs=0.01), 1.0: 0.0}  # bytes are exact even in a quick run
    small = [(r["num_tables"], r["batch_size"]) for r in records if "small_batch_overhead" in r]
    assert small == [(26, 64), (26, 256), (26, 2048)]


@pytest.mark.slow
def test_bench_overlap_quick(tmp_path: Path) -> None:
    records = quick_records("overlap", tmp_path)
    assert [(r["schedule"], r["num_micro_batches"]) for r in records] == [("intra", 2), ("nested", 2)]
    assert all(r["exposed_exchange_ms"] > 0 for r in records)


@pytest.mark.slow
def test_bench_consistency_quick(tmp_path: Path) -> None:
    records = quick_records("consistency", tmp_path)
    fresh = [(schedule, False) for schedule in SCHEDULES]
    assert [(r["schedule"], r["stale"]) for r in records] == [*fresh, ("nested", True)]
    assert [r.get("equals_serial") for r in records] == [*(1 for _ in SCHEDULES), None]
    assert len({r["digest"] for r in records}) == 2  # stale rows give another digest
    assert not find_misses(load_targets("consistency"), records)


@pytest.mark.slow
def test_bench_attention_quick(tmp_path: Path) -> None:
    records = quick_records("attention", tmp_path)
    assert [(r["form"], r["length"]) for r in records] == [
        ("blocked", 64),
        ("plain", 64),
        ("blocked", 256),
        ("plain", 256),
    ]
    assert ["speed_vs_plain" in r for r in records] == [True, False, True, False]
    assert ["peak_bytes_per_token_vs_512" in r for r in records] == [False, False, True, False]
    assert all(r["peak_bytes_per_token"] > 0 and r["forward_backward_ms"] > 0 for r in records)


@pytest.mark.slow
def test_bench_plain_quick(tmp_path: Path) -> None:
    records = quick_records("plain", tmp_path)
    assert [record["method"] for record in records] == ["adagrad", "adam"]
    for record in records:
        assert (record["schedule"], record["ranks"], record["threads"]) == ("inter", 1, 1)
        ratios = ("embedding_speed_vs_plain", "serial_embedding_speed_vs_plain", "speed_vs_plain")
        spreads = [f"{ratio}{end}" for ratio in ratios for end in ("_low", "_high")]
        for field in ("plain_ms", "ours_ms", "serial_ms", "dense_ms", *ratios, *spreads):
            assert isinstance(record[field], float)


@pytest.mark.slow
def test_bench_cluster_quick(tmp_path: Path) -> None:
    records = quick_records("cluster", tmp_path)
    assert [record["method"] for record in records] == ["none", "minhash", "spectral", "bisection"] * 4
    for none, _, spectral, bisection in zip(*[iter(records)] * 4, strict=True):
        assert none["recovery"] == 0.0
        assert 1 < spectral["expansion"] < none["expansion"]
        assert 1 < bisection["expansion"] < none["expansion"]
        assert spectral["head_share"] + spectral["tail_share"] < 0.7 * (none["head_share"] + none["tail_share"])


@pytest.mark.slow
def test_bench_reader_quick(tmp_path: Path) -> None:
    records = quick_records("reader", tmp_path)
    assert [(r["data"], r["model"], r["reader_cores"]) for r in records] == [
        ("clicks", "dlrm", 1),
        ("histories", "hstu", 1),
    ]
    assert all(r["read_samples_per_second"] > 0 and r["consumed_samples_per_second"] > 0 for r in records)


@pytest.mark.slow
def test_bench_learning_quick(tmp_path: Path) -> None:
    records = quick_records("learning", tmp_path)
    assert [record["model"] for record in records] == ["hstu", "fuxi"]
    for record in records:
        assert record["loss_difference"] < 1e-6
        assert record["popularity_hr_10"] < record["bigram_hr_10"] < record["oracle_hr_10"]


@pytest.mark.slow
def test_bench_checkpoint_quick(tmp_path: Path) -> None:
    records = quick_records("checkpoint", tmp_path)
    assert all((r["rows"], r["dim"], r["threads"], r["schedule"]) == (40_000, 64, 1, "nested") for r in records)
    incremental = next(r["incremental_bytes_vs_complete"] for r in records if "incremental_bytes_vs_complete" in r)
    assert 0.05 < incremental < 0.08  # bytes are exact even in a quick run
    assert [field for field in ("reading_seconds", "checksum_seconds", "import_seconds") if field in records[2]]
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoint.json"]


@pytest.mark.slow
def test_bench_faults_quick(tmp_path: Path) -> None:
    records = quick_records("faults", tmp_path)
    assert [r["kind"] for r in records] == ["kill-save", "kill-load", "damage-records", "all"]
    assert [r["faults"] for r in records] == [1, 1, 1, 3]
    assert all(r["lost_steps"] == r["digest_mismatches"] == 0 for r in records)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench", "faults", "--json", "x.json", "--kind", "kill"], "there are kill-clock"),
        (["bench", "store", "--json", "missing/folder/x.json", "--quick"], "does not exist"),
        (["bench", "store"], "--json"),
        (["bench", "stor", "--json", "x"], "No such command 'stor'"),
        (["bench", "store", "--json", "x.json", "--quick", "--check"], "--quick has no thresholds"),
    ],
)
def test_mistakes(arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code != 0
    assert text in done.stderr
