"""`nestpipe data inspect` as users call it."""

import json
from pathlib import Path

from typer.testing import CliRunner

from nestpipe.cli.main import app
from tests.files import write_histories, write_numbers


def test_inspect(tmp_path: Path) -> None:
    runner, result = CliRunner(), tmp_path / "result.json"
    done = runner.invoke(app, ["data", "inspect", str(write_histories(tmp_path / "ml")), "--json", str(result)])
    assert done.exit_code == 0, done.output
    for text in ("prepared histories of movielens-1m: 2 files", "memory of the rows with dim 64 and adagrad: about"):
        assert text in done.output
    assert json.loads(result.read_text())["keys"][0]["num_distinct"] == 50
    (path,) = write_numbers(tmp_path, (20,))
    done = runner.invoke(app, ["data", "inspect", str(path)])
    assert "--keys COLUMN,COLUMN... says which columns are keys" in done.output
    done = runner.invoke(app, ["data", "inspect", str(path), "--keys", "number,tags", "--optimizer", "adam"])
    assert "dim 64 and adam" in done.output
    for arguments in (["--keys", "x"], ["--optimizer", "lion"]):
        done = runner.invoke(app, ["data", "inspect", str(path), *arguments])
        assert done.exit_code == 2
