"""Benchmarks that cannot run in an installed wheel say why, without a traceback."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.bench.harness import requirements
from nestpipe.cli.main import app


@pytest.mark.parametrize("name", ["consistency", "learning", "reader"])
def test_recipes_come_with_the_source_tree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a benchmark reads its recipe by another way than source_file."""
    monkeypatch.setattr(requirements, "SOURCE_TREE", tmp_path)
    result = CliRunner().invoke(app, ["bench", name, "--quick", "--json", str(tmp_path / "result.json")])
    assert result.exit_code == 2
    assert "comes with the source tree" in " ".join(result.output.replace("│", " ").split())


def test_prepare_needs_duckdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    result = CliRunner().invoke(app, ["bench", "prepare", "--quick", "--json", str(tmp_path / "result.json")])
    assert result.exit_code == 2
    assert "nestpipe[datasets]" in result.output
