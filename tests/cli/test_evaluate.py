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

from nestpipe import World
from nestpipe.checkpoint import find_checkpoint, read_recipe
from nestpipe.checkpoint.manifest import sealed
from nestpipe.cli.main import app
from nestpipe.recipe.run import evaluate_saved
from nestpipe.recipe.text import change_config, parse_config
from tests import forked
from tests.cli.test_train import SMALL
from tests.ranks import run_ranks


def nestpipe(*arguments: str, forks: bool = True) -> str:
    """Returns the output. forks: in a fork, which starts quickly but has one rank."""
    command = [sys.executable, "-m", "nestpipe", *arguments]
    done = (
        forked.nestpipe(*arguments) if forks else subprocess.run(command, capture_output=True, text=True, timeout=120)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_metrics_equal_those_of_the_training(ranks: int, tmp_path: Path) -> None:
    folder, trained, evaluated = tmp_path / "runs" / "save", tmp_path / "a.json", tmp_path / "b.json"
    settings = sets(*SMALL, "train.steps=5", "evaluate.every=2", f"checkpoint.dir={folder}")
    out = nestpipe("train", "--ranks", str(ranks), "--json", str(trained), *settings, forks=ranks == 1)
    lines = [line for line in out.splitlines() if line.startswith("evaluation after step")]
    assert [line.split(":")[0][-1] for line in lines] == ["2", "4"]
    assert "loss 0." in lines[0]
    assert "auc 0." in lines[0]
    summary = json.loads(trained.read_text())
    assert [validation["step"] for validation in summary["validations"]] == [2, 4]
    assert summary["validations"][0]["loss"] != summary["validations"][1]["loss"]
    assert {validation["num_samples"] for validation in summary["validations"]} == {500}
    assert not summary["is_stopped_early"]

    out = nestpipe("evaluate", str(folder.parent), "--json", str(evaluated), forks=ranks == 1)
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


def metrics_of(world: World, path: Path) -> dict[str, float]:
    recipe, _ = read_recipe(path)
    batch_size = f"evaluate.batch_size={60 // world.size}"  # untrained keys are counted once in a global batch
    config = change_config(parse_config(recipe, str(path)), ["evaluate.num_samples=500", batch_size])
    metrics: dict[str, float] = evaluate_saved(config.resolved(1, 2), world, path)["metrics"]
    return metrics


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_more_ranks_than_saved_the_model(saved: Path, ranks: int) -> None:
    """Fails if a load at another world size takes the rows of one saved rank only, or leaves rows out."""
    path = find_checkpoint(saved)
    expected = metrics_of(World(), path)
    assert expected["num_untrained_keys"] > 0
    for metrics in run_ranks(ranks, metrics_of, path):
        assert metrics == pytest.approx(expected, rel=1e-6)


def test_fewer_ranks_than_saved_the_model() -> None:
    path = Path(__file__).parent.parent / "old_checkpoints" / "v0.1" / "histories-2"
    expected = json.loads((path.parent / "expected.json").read_text())["histories-2"]["metrics"]
    recipe, _ = read_recipe(path)
    result = evaluate_saved(parse_config(recipe, str(path)), World(), path)
    assert result["metrics"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("arguments", "expected"), [((), 2), (("--ranks", "3"), 3), (("--ranks", "1"), None)])
def test_number_of_ranks(arguments: tuple[str, ...], expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved by two ranks, which is the default. Fails if evaluate starts num_saved ranks, whatever --ranks says."""
    started: list[int] = []
    monkeypatch.setattr("nestpipe.cli.evaluate.launch", lambda num_ranks, words: started.append(num_ranks) or 0)
    monkeypatch.setattr("nestpipe.cli.evaluate.on_this_rank", lambda config, work: None)
    path = Path(__file__).parent.parent / "old_checkpoints" / "v0.1" / "histories-2"
    result = CliRunner().invoke(app, ["evaluate", str(path), *arguments])
    assert result.exit_code == 0, result.output
    assert started == ([] if expected is None else [expected])


def refused(*arguments: str, expected: int = 2) -> str:
    result = CliRunner().invoke(app, ["evaluate", *arguments])
    assert result.exit_code == expected, result.output
    assert "Traceback" not in result.output
    return result.output


def test_refusals(saved: Path, tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'nothing'}" in refused(str(tmp_path / "nothing"))
    assert f"{tmp_path} is not a complete checkpoint" in refused(str(tmp_path))
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
