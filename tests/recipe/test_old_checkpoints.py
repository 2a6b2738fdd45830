"""Checkpoints of earlier versions load, and evaluate to the numbers that their runs printed.

Fails, for example, if load._read does not know format 1, or if a retired key of the saved recipe is refused.
"""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from nestpipe import World
from nestpipe.checkpoint import find_checkpoint, read_recipe
from nestpipe.recipe.config import RETIRED
from nestpipe.recipe.run import evaluate_saved, run
from nestpipe.recipe.text import change_config, load_config, parse_config
from nestpipe.recipe.value import ConfigError
from tests.checkpoint.saved import OWN_FILES
from tests.exactness.cases import Case, global_batches, make_trainer, on_ranks, share_of

FOLDER = Path(__file__).parent.parent / "old_checkpoints" / "v0.1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
CASE = Case("adam", "pooled_mean", 2)


def evaluate(world: World, path: Path) -> dict[str, float]:
    recipe, num_ranks = read_recipe(path)
    assert num_ranks == world.size
    return evaluate_saved(parse_config(recipe, str(path)), world, path)


@pytest.mark.parametrize("name", [name for name in EXPECTED if "metrics" in EXPECTED[name]])
def test_evaluates(name: str) -> None:
    for result in on_ranks(int(name[-1]), evaluate, FOLDER / name):
        assert result["steps"] == EXPECTED[name]["steps"]
        # The last bits of a matrix product depend on the processor.
        assert result["metrics"] == pytest.approx(EXPECTED[name]["metrics"], rel=1e-6)


def load_and_go_on(world: World, path: Path, target: Path) -> tuple[str, str, str]:
    """Returns digests after loading, after two more steps, and after a save, a load and the same two steps."""
    trainer = make_trainer(world, CASE)
    trainer.load(path)
    loaded = trainer.digest()
    trainer.save(target)
    batches = share_of(global_batches(6), world)[4:]
    trainer.fit(batches)
    again = make_trainer(world, CASE)
    again.load(target)
    again.fit(batches)
    return loaded, trainer.digest(), again.digest()


@pytest.mark.parametrize("name", ["trainer-1", "trainer-2"])
def test_loads_and_goes_on(name: str, tmp_path: Path) -> None:
    for loaded, continued, again in on_ranks(int(name[-1]), load_and_go_on, FOLDER / name, tmp_path / "save"):
        assert loaded == EXPECTED[name]["digest"]
        assert continued == again


def test_a_run_resumes_in_the_old_folder(tmp_path: Path) -> None:
    """The files of 0.1 count as a checkpoint: two are kept, so the second new one replaces them."""
    folder = tmp_path / "save"
    shutil.copytree(FOLDER / "clicks-1", folder)
    recipe, _ = read_recipe(folder)
    for steps, kept in ((3, {"manifest.json", "dense.pt", "rank0.pt"}), (4, {"step-00000003"})):
        config = change_config(parse_config(recipe, ""), [f"checkpoint.dir={folder}", f"train.steps={steps}"])
        summary = run(config, World())
        assert (summary["steps"], summary["resumed_from_step"]) == (steps, steps - 1)
        assert {child.name for child in folder.iterdir()} == {*OWN_FILES, *kept, f"step-{steps:08d}"}
        assert find_checkpoint(folder) == folder / f"step-{steps:08d}"


def test_retired_keys(tmp_path: Path) -> None:
    """Fails if _is_retired does not compare the value."""
    recipe, _ = read_recipe(FOLDER / "clicks-1")
    for name, value in RETIRED.items():
        section, key = name.split(".")
        assert tomllib.loads(recipe)[section][key] == value
        file = tmp_path / "recipe.toml"
        file.write_text(f'[{section}]\n{key} = "something"\n')
        with pytest.raises(ConfigError, match=rf'{name} in .* is "something".*there is no such key any more'):
            load_config(file)
