"""`nestpipe train` and `nestpipe evaluate` on histories, as a user calls them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ("train.steps=6", "train.batch_size=32", "model.num_negatives=4", "evaluate.num_samples=100")


def nestpipe(*arguments: str, settings: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    sets = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "nestpipe", *arguments, *sets]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


@pytest.mark.parametrize(("kind", "ranks"), [pytest.param("hstu", 2, marks=pytest.mark.slow), ("fuxi", 1)])
def test_train_and_evaluate(kind: str, ranks: int, tmp_path: Path) -> None:
    """Fails if run saves a recipe in which the row optimizer is not resolved, or held_out ends after one evaluation."""
    recipe, folder = str(RECIPES / f"{kind}-histories.toml"), f"checkpoint.dir={tmp_path / 'model'}"
    paths = tmp_path / "train.json", tmp_path / "evaluate.json"
    settings = (*SMALL, folder, "evaluate.every=3", "evaluate.metric=hr_at_10")
    done = nestpipe("train", recipe, "--ranks", str(ranks), "--json", str(paths[0]), settings=settings)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("100 held-out samples", "among 2,000 items", "HR@10", "NDCG@50", "MRR"))
    done = nestpipe("evaluate", str(tmp_path / "model"), "--json", str(paths[1]))
    assert done.returncode == 0, done.stderr
    trained, evaluated = (json.loads(path.read_text()) for path in paths)
    assert evaluated["metrics"] == trained["metrics"]
    assert [validation["step"] for validation in trained["validations"]] == [3, 6]
    assert 'kind = "adam"' in trained["config"]


def test_data_without_a_reader() -> None:
    done = nestpipe("train", str(RECIPES / "hstu-ml-1m.toml"))
    assert done.returncode == 1
    assert "needs prepared data; its reader is not part of this version" in done.stderr
    assert "Traceback" not in done.stderr
