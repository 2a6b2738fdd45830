"""A benchmark is found, and has its command, because its file is in the folder."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nestpipe.bench
from nestpipe.bench.harness.benchmark import find_benchmarks
from nestpipe.cli.bench import make_app

OWN = """
from typing import Annotated

import typer

from nestpipe.bench.harness.benchmark import Benchmark


def records(quick, *, depth: Annotated[int, typer.Option("--depth", help="How deep.")] = 3):
    if depth > 9:
        raise ValueError("depth must be at most 9")
    return iter([{"depth": depth, "quick": quick}])


BENCHMARK = Benchmark("dig", records, "Digs.", result="dig-{depth}")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Adds a folder to those where benchmarks are found."""
    monkeypatch.setattr(nestpipe.bench, "__path__", [*nestpipe.bench.__path__, str(tmp_path)])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("nestpipe.bench.dig")]:
        del sys.modules[name]


@pytest.mark.parametrize("file", ["dig.py", "dig/run.py"])
def test_a_file_is_a_command(file: str, folder: Path) -> None:
    """Fails if _command drops the options of a benchmark, or _run catches no error of its records function."""
    module, path = folder / file, folder / "result.json"
    module.parent.mkdir(exist_ok=True)
    if "/" in file:
        (module.parent / "__init__.py").touch()
    module.write_text(OWN)
    app = make_app(find_benchmarks())
    done = CliRunner().invoke(app, ["dig", "--json", str(path), "--quick", "--depth", "5"])
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert (result["bench"], result["records"]) == ("dig-5", [{"depth": 5, "quick": True}])
    refused = CliRunner().invoke(app, ["dig", "--json", str(folder / "other.json"), "--depth", "10"])
    assert refused.exit_code == 2
    assert "depth must be at most 9" in refused.output
    assert not (folder / "other.json").exists()


def test_names_are_those_of_the_files() -> None:
    folder = Path(nestpipe.bench.__file__).parent
    files = {path.stem for path in folder.iterdir() if path.stem not in ("__init__", "__pycache__", "harness")}
    assert {benchmark.name for benchmark in find_benchmarks()} == files
