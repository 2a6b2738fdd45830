"""`nestpipe evaluate`: gives the metrics of the training run that saved the model, and refuses mistakes.

Fails, for example, if evaluate_saved does not load the checkpoint, if run does not save its recipe, or if _evaluate
continues where the previous evaluation has ended.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.checkpoint.manifest import sealed
from nestpipe.cli.main import app
from tests.cli.test_train import SMALL


def nestpipe(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "nestpipe", *arguments], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_metrics_equal_those_of_the_training(ranks: int, tmp_path: Path) -> None:
    folder, trained, evaluated = tmp_path / "runs" / "save", tmp_path / "a.json", tmp_path / "b.json"
    settings = sets(*SMALL, "train.steps=5", "evaluate.every=2", f"checkpoint.dir={folder}")
    out = nestpipe("train", "--ranks", str(ranks), "--json", str(trained), *settings)
    lines = [line for line in out.splitlines() if line.startswith("evaluation after step")]
    assert [line.split(":")[0][-1] for line in lines] == ["2", "4"]
    assert "loss 0." in lines[0]
    assert "auc 0." in lines[0]
    summary = json.loads(trained.read_text())
    assert [validation["step"] for validation in summary["validations"]] == [2, 4]
    assert summary["validations"][0]["loss"] != summary["validations"][1]["loss"]
    assert {validation["num_samples"] for validation in summary["validations"]} == {500}
    assert not summary["is_stopped_early"]

    out = nestpipe("evaluate", str(folder.parent), "--json", str(evaluated))
    result = json.loads(evaluated.read_text())
    assert result["metrics"] == summary["metrics"]
    assert (result["steps"], result["ranks"], result["config"]) == (5, ranks, summary["config"])
    for text in ("500 held-out samples", f"{summary['metrics']['auc']:.4f}", "constant prediction", "5 steps"):
        assert text in out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "save"
    nestpipe("train", *sets(*SMALL, "train.steps=1", "evaluate.num_samples=0", f"checkpoint.dir={folder}"))
    return folder


def refused(*arguments: str, expected: int = 2) -> str:
    result = CliRunner().invoke(app, ["evaluate", *arguments])
    assert result.exit_code == expected, result.output
    assert "Traceback" not in result.output
    return result.output


def test_refusals(saved: Path, tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'nothing'}" in refused(str(tmp_path / "nothing"))
    assert f"{tmp_path} is not a complete checkpoint" in refused(str(tmp_path))
    assert "was saved by 1 ranks; --ranks must be 1, or left out" in refused(str(saved), "--ranks", "2")
    assert "unknown key evaluate.num_sample of --set" in refused(str(saved), *sets("evaluate.num_sample=1"))
    assert "cannot be written" in refused(str(saved), "--json", str(tmp_path / "no" / "a.json"))
    assert "evaluate.num_samples is 0: nothing is evaluated" in refused(str(saved), expected=1)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(sealed({"checksums": {}, "world_size": 1}))
    assert f"several checkpoints, {tmp_path / 'one'}, {tmp_path / 'two'}; name one" in refused(str(tmp_path))
    assert f"{tmp_path / 'one'} was saved without a recipe" in refused(str(tmp_path / "one"))
    (tmp_path / "one" / "manifest.json").write_text("[]")
    assert "is not the manifest of a checkpoint" in refused(str(tmp_path / "one"))
    other_model = sets("evaluate.num_samples=10", "model.dim=4")
    assert "table 'c00': dim is 8 in the checkpoint, 4 here" in refused(str(saved), *other_model, expected=1)
