"""`nestpipe checkpoint` as users call it: what it prints, files it writes, exit codes.

Fails, for example, if verify does not raise Exit(1), if diff passes no may_change, or if a line of `--help` is missing.
"""

import json
import math
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from nestpipe.cli.main import app
from tests.checkpoint.made import RECIPE, Program, saved_chain, write_as_ranks
from tests.checkpoint.test_tools import OLD, flip


def call(*arguments: object) -> Result:
    result = CliRunner().invoke(
        app, ["checkpoint", *map(str, arguments)], env={"COLUMNS": "180", "TERM": "dumb", "TERMINAL_WIDTH": "120"}
    )
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def words(result: Result, expected: int = 0) -> str:
    """Returns the output with single spaces and without the lines of tables."""
    assert result.exit_code == expected, result.output
    return " ".join(result.output.replace("│", " ").replace("┃", " ").split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chain") / "run"
    saved_chain(folder)
    return folder


def test_inspect(run: Path, tmp_path: Path) -> None:
    listed = words(call("inspect", run, "--json", tmp_path / "folder.json"))
    assert "step-00000001 1 400" in listed
    assert re.search(r"step-00000003 1 24 0\.02 [-\d]+ [:\d]+ step-00000002 newest good", listed)
    assert json.loads((tmp_path / "folder.json").read_text())["checkpoints"][2]["is_newest_good"]
    shown = words(call("inspect", run / "step-00000003", "--json", tmp_path / "one.json"))
    for text in (
        "step: 3",
        "content: changes since step-00000002; all rows are in step-00000001",
        "ranks: 1",
        "micro-batches: 2",
        "dense part: 2 parameters and buffers, 10 values",
        "optimizer: Adam",
        "data: position 36",
        "recipe: saved",
        "item 22 3 3 3 float32 adagrad",
    ):
        assert text in shown
    content = json.loads((tmp_path / "one.json").read_text())
    assert (content["num_steps"], content["tables"][1]["name"], content["recipe"]) == (3, "user/id", RECIPE)
    assert "content: complete" in words(call("inspect", run / "step-00000001"))


def test_inspect_damaged_and_unfinished(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "step-00000003" / "rank00000.safetensors").unlink()
    for name in ("step-00000004.partial-1f", "step-00000004.removed2", "step-00000004-r1.damaged"):
        (folder / name).mkdir()
    listed = words(call("inspect", folder))
    assert "step-00000001 newest good" in listed  # the second one, whose base is the first
    assert "step-00000002 damaged" in listed
    assert "damaged: " in listed
    assert "step-00000003/rank00000.safetensors is missing" in listed
    assert "step-00000004.partial-1f: is being written, or was left by a run that was killed" in listed
    assert "step-00000004.removed2: was being removed" in listed
    assert "step-00000004-r1.damaged: was passed over" in listed
    assert "damaged: " in words(call("inspect", folder / "step-00000003"))


def test_verify(run: Path, tmp_path: Path) -> None:
    done = words(call("verify", run))
    assert "of all" in done  # progress
    assert "3 checkpoints, 24 files" in done
    assert "everything is right" in done
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shard = folder / "step-00000001" / "rank00000-shard002.rows"
    flip(shard, -100)
    flip(folder / "step-00000002" / "dense.safetensors", 300)
    found = words(call("verify", folder, "--json", tmp_path / "problems.json"), 1)
    assert f"{shard}: block" in found
    assert f"{folder}/step-00000002/dense.safetensors: is damaged or of another save" in found
    assert "wrong: 2 files" in found
    problems = json.loads((tmp_path / "problems.json").read_text())["problems"]
    assert problems[0]["file"] == str(shard)
    assert "wrong: 1 file" in words(call("verify", folder / "step-00000001"), 1)
    assert "1 checkpoint, 4 files" in words(call("verify", OLD / "trainer-2"))


def test_diff(run: Path, tmp_path: Path) -> None:
    differs = words(call("diff", run / "step-00000001", run, "--json", tmp_path / "diff.json"), 1)
    for text in ("num_steps 1 3", "data/position 12 36", "item 300 291 1 10 41 0 4.87", "model/weight float32 [2, 4]"):
        assert text in differs
    assert differs.endswith("the content differs")
    assert json.loads((tmp_path / "diff.json").read_text())["is_equal"] is False
    equal = words(call("diff", run, run / "step-00000003"))
    assert equal.endswith("equal rows: 2 tables the content is equal")


def test_a_difference_that_is_not_finite(tmp_path: Path) -> None:
    """JSON has no infinity. Fails if the number is written as it is."""
    paths = [
        write_as_ranks(tmp_path / name, 1, {"item": {1: ([value] * 6, 0)}}, {}, 1, 1, None)
        for name, value in (("a", 1.0), ("b", math.inf))
    ]
    assert "inf" in words(call("diff", *paths, "--json", tmp_path / "diff.json"), 1)
    assert "Infinity" not in (tmp_path / "diff.json").read_text()
    assert json.loads((tmp_path / "diff.json").read_text())["tables"][0]["largest"] == "inf"


def test_diff_of_recipes(tmp_path: Path) -> None:
    """Keys that a resumed run may change, and a batch size with the same global batch, are shown and do not count."""
    others = RECIPE.replace('"out"', '"other"'), RECIPE.replace("batch_size = 12", "batch_size = 6")
    paths = []
    for number, recipe in enumerate((RECIPE, *others)):
        program = Program(tmp_path / str(number), recipe)
        program.train({"item": [1]})
        paths.append(program.save())
    assert "checkpoint.dir out other does not count" in words(call("diff", paths[0], paths[1]))
    assert "train.batch_size 12 6" in words(call("diff", paths[0], paths[2]), 1)


def test_export(run: Path, tmp_path: Path) -> None:
    done = words(call("export", run, "--out", tmp_path / "out"))
    assert "item: 291 rows of 3 in 1 file" in done
    assert f"step-00000003 was exported to {tmp_path / 'out'}" in done
    table = pq.read_table(tmp_path / "out" / "item" / "part-00000.parquet")
    assert table.column_names == ["key", "row"]
    words(call("export", run / "step-00000001", "--out", tmp_path / "with state", "--with-state"))
    table = pq.read_table(tmp_path / "with state" / "item" / "part-00000.parquet")
    assert (table.column_names, table.num_rows) == (["key", "row", "state", "step"], 300)
    assert "exists and is not an empty folder" in words(call("export", run, "--out", tmp_path / "out"), 2)


def test_a_newer_damaged_one_is_passed_over(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "step-00000003" / "dense.safetensors").unlink()
    done = words(call("export", folder, "--out", tmp_path / "out"))
    assert "a damaged checkpoint is passed over: " in done
    assert json.loads((tmp_path / "out" / "model.json").read_text())["steps"] == 2


def test_refusals(run: Path, tmp_path: Path) -> None:
    """Exit code 2, and one line that names the cause."""
    nothing = tmp_path / "nothing"
    for command in (["inspect"], ["verify"], ["diff", run], ["export", "--out", tmp_path / "out"]):
        assert f"there is no folder {nothing}" in words(call(*command, nothing), 2)
    assert "cannot be written" in words(call("inspect", run, "--json", tmp_path / "no" / "a.json"), 2)
    assert "has format 1" in words(call("diff", run, OLD / "trainer-1"), 2)
    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    flip(damaged / "step-00000001" / "rank00000-shard002.rows", -100)
    assert "is damaged: its checksum is wrong" in words(call("diff", run, damaged), 2)
    assert "is damaged: its checksum is wrong" in words(call("export", damaged, "--out", tmp_path / "out"), 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("inspect", ["--json", "newest good", "nestpipe checkpoint inspect out/step-00000060 --json content.json"]),
        ("verify", ["--json", "Exit code: 0 if everything is right, 1 if anything is wrong", "checkpoint verify out"]),
        (
            "diff",
            ["--json", "Exit code: 0 if the content is equal, 1 if it differs, 2 on errors", "diff out other-run"],
        ),
        ("export", ["--out", "--with-state", "model.json", "dense.safetensors", "part-00000.parquet", "serve.py"]),
    ],
)
def test_help(command: str, texts: list[str]) -> None:
    shown = words(call(command, "--help"))
    assert all(text in shown for text in texts), shown
    assert command in words(CliRunner().invoke(app, ["checkpoint", "--help"]))
