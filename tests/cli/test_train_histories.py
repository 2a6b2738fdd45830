"""`nestpipe train` and `nestpipe evaluate` on histories, as a user calls them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.files import write_histories

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ("train.steps=6", "train.batch_size=32", "model.num_negatives=4", "evaluate.num_samples=100")


def nestpipe(*arguments: str, settings: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    sets = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "nestpipe", *arguments, *sets]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [("hstu", 2), ("fuxi", 1)])
def test_train_and_evaluate(kind: str, ranks: int, tmp_path: Path) -> None:
    """Fails if run saves a recipe with an unresolved row optimizer, or held_out ends after one evaluation."""
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


def test_a_recipe_on_prepared_data(tmp_path: Path) -> None:
    """The published metrics are printed next to the model's."""
    recipe, folder = str(RECIPES / "hstu-ml-1m.toml"), write_histories(tmp_path / "data")
    settings = ("train.steps=2", "train.batch_size=16", f"data.path={folder}", "data.skip_bad=true")
    done = forked.nestpipe("train", recipe, *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("60 held-out samples", "among 50 items", "published"))
    assert "evaluated on the test\n" in done.stdout
    assert re.search(r"HR@10 .* 0\.\d{4} .* 0\.3097 ", done.stdout)
    assert re.search(r"NDCG@10 .* 0\.\d{4} .* 0\.1720 ", done.stdout)
    assert "left out of the data for training: 0 files that cannot be opened, 0 row groups" in done.stdout
