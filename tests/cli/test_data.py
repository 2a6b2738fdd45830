"""`nestpipe data` as users call it."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from nestpipe.cli.data_progress import show_stages
from nestpipe.cli.main import app
from nestpipe.data.files.manifest import read_manifest
from nestpipe.datasets.engine import Engine
from nestpipe.datasets.published import published_formats
from tests.cli.test_commands import quick_records


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})


def test_generate_then_prepare(tmp_path: Path) -> None:
    source, target = tmp_path / "src", tmp_path / "dst"
    made = call("generate", "movielens", source, "--rows", 400, "--variant", "20m", "--seed", 5)
    assert made.exit_code == 0, made.output
    size = (source / "ml-20m" / "ratings.csv").stat().st_size
    assert made.output == f"ml-20m/ratings.csv: {size:,} bytes\n"
    done = call("prepare", "movielens", source, target)
    assert done.exit_code == 0, done.output
    manifest = read_manifest(target)
    assert "reading: 0% of all" in done.output
    assert "events: 400\n" in done.output
    assert "bad lines: 0\n" in done.output
    assert f"checksum of the manifest: {manifest.checksum()}\n" in done.output
    again = call("prepare", "movielens", source, target)
    assert (again.exit_code, "is prepared already" in again.stderr) == (2, True)
    assert call("prepare", "movielens", source, target, "--force").exit_code == 0


def test_bad_lines_are_named_or_counted(tmp_path: Path) -> None:
    file = tmp_path / "ratings.dat"
    file.write_text("1::2::3::4\n1::x::3::4\n5::6::7\n")
    done = call("prepare", "movielens", tmp_path, tmp_path / "dst")
    assert done.exit_code == 2
    assert f"nestpipe: {file} line 2: movieId is 'x', must be a whole number, 0 or more; " in done.stderr
    assert "Traceback" not in done.output
    skipped = call("prepare", "movielens", tmp_path, tmp_path / "dst", "--skip-bad")
    assert skipped.exit_code == 0
    assert "bad lines: 2\n" in skipped.output
    assert json.loads((tmp_path / "dst" / "manifest.json").read_text())["counts"]["bad_lines"] == 2


def test_help_and_refusals(tmp_path: Path) -> None:
    prepare_help, generate_help = (call(command, "--help").output for command in ("prepare", "generate"))
    assert all(word in prepare_help for word in ("--skip-bad", "--force", "criteo", "kuairand", "movielens"))
    assert all(word in generate_help for word in ("--rows", "--seed", "--variant", *published_formats()))
    assert all(variant in generate_help for one in published_formats().values() for variant in one.variants)
    unknown = call("prepare", "news", tmp_path, tmp_path / "dst")
    assert unknown.exit_code == 2
    assert "there is no format 'news'; formats are criteo, kuairand, movielens" in unknown.stderr
    refused = call("generate", "criteo", tmp_path / "dst", "--rows", 10, "--variant", "1m")
    assert (refused.exit_code, "variants are kaggle, terabyte" in refused.stderr) == (2, True)


def test_the_engine_is_asked_for_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_packaging.py shows that everything else works where DuckDB is not installed."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ValueError, match="needs DuckDB; install it"):
        Engine(Path("x"))


def test_a_terminal_has_a_bar() -> None:
    text = io.StringIO()
    with show_stages(Console(file=text, force_terminal=True, width=100)) as report:
        report("reading", 0.25)
    assert "reading" in text.getvalue()
    assert " 25%" in text.getvalue()


@pytest.mark.slow
def test_bench_prepare_quick(tmp_path: Path) -> None:
    speed, killed = quick_records("prepare", tmp_path)
    assert 1e8 < speed["peak_rss_bytes"] < 2e9
    assert (killed["num_killed"], killed["same_manifest"]) == (1, 1)
