"""`nestpipe simulate`, as a user calls it."""

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from nestpipe.cli.main import app


def simulate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_a_cluster(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("[run]\nsteps = 10\n[jitter]\nsigma = 0.0\n")
    files = [tmp_path / name for name in ("r.json", "p.svg", "t.json")]
    result = simulate(cluster, "--workers", "8,64", "--json", files[0], "--plot", files[1], "--trace", files[2])
    assert result.exit_code == 0, result.output
    assert "64 workers" in result.output
    records = json.loads(files[0].read_text())["records"]
    assert {(r["workers"], r["way"]) for r in records} >= {(w, "nested") for w in (8, 64)}
    named = {"step_ms", "exposed_lookup_ms", "exposed_exchange_ms", "busy_share_host", "samples_per_second"}
    assert all(named | {"scaling_efficiency"} <= set(record) for record in records)
    assert files[1].read_text().startswith("<svg")
    # Costs from the simulated trace predict the machine that it shows.
    predicted = simulate("--from-trace", files[2], "--json", tmp_path / "q.json")
    assert predicted.exit_code == 0, predicted.output
    assert "fit error" in predicted.output
    assert "nested-cross-batch: batch.key_overlap = 0.3, of the default cluster" in predicted.output
    made = {r["way"]: r for r in json.loads((tmp_path / "q.json").read_text())["records"] if "fit_error" not in r}
    assert set(made) == {"serial", "inter", "intra", "nested", "nested-cross-batch"}


def test_keys_are_listed() -> None:
    result = simulate("--list-keys")
    assert result.exit_code == 0
    assert "network.incast" in result.output


def test_what_is_refused(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("[pol]\n")
    for arguments, text in (
        ((cluster,), 'unknown section "pol"'),
        (("--workers", "8,x"), "must be whole numbers with commas between them"),
        (("--way", "fast"), "--way is 'fast', must be one of serial, stale"),
        (("--json", tmp_path / "no" / "r.json"), "cannot be written"),
        (("--from-trace", cluster, "--workers", "8"), "leave out --workers"),
        (("--from-trace", cluster), "is not a trace"),
    ):
        result = simulate(*arguments)
        assert result.exit_code == 2, arguments
        assert text in " ".join(result.output.split()), result.output
