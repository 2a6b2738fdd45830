"""The same command resumes a run: what may differ, what may not, and how to begin a new run.

Fails, for example, if open_folders returns None where there is a checkpoint, if _FREE_SECTIONS has 'model', or if
_resume does not load the state of the data or of the validation.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe import World
from nestpipe.checkpoint import CheckpointError, find_checkpoint
from nestpipe.recipe.resume import with_saved_machine_keys
from nestpipe.recipe.run import Summary, run
from nestpipe.recipe.text import load_config
from nestpipe.recipe.value import ConfigError
from tests.recipe.test_run import SMALL


def run_small(*settings: str, recipe: Path | None = None, fresh: bool = False) -> Summary:
    return run(load_config(recipe, (*SMALL, *settings)).resolved(1, 1), World(), fresh=fresh)


def test_the_same_command_again(tmp_path: Path) -> None:
    """A longer run goes on, a finished one trains nothing, a shorter one replaces nothing; a user's files stay."""
    folder = tmp_path / "out"
    saved, best = f"checkpoint.dir={folder}", f"checkpoint.best={folder / 'best'}"
    first = run_small(saved, best, "train.steps=4", "evaluate.every=4")
    assert (first["steps"], first["resumed_from_step"]) == (4, 0)
    (folder / "notes.txt").write_text("mine")
    longer = run_small(saved, best, "train.steps=6", "evaluate.every=2", "checkpoint.every=1", "logging.every=3")
    assert (longer["steps"], longer["resumed_from_step"]) == (6, 4)
    assert longer["digest"] == run_small("train.steps=6")["digest"]
    for steps in (6, 2):
        finished = run_small(saved, f"train.steps={steps}")
        assert (finished["steps"], finished["resumed_from_step"], finished["final_loss"]) == (6, 6, None)
        assert finished["digest"] == longer["digest"]
        assert finished["metrics"] == longer["metrics"]
    assert find_checkpoint(folder) == folder / "step-00000006"
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "best").is_dir()


def test_load_applies_to_an_empty_folder_only(tmp_path: Path) -> None:
    run_small(f"checkpoint.dir={tmp_path / 'a'}", "train.steps=2")
    both = (f"checkpoint.load={tmp_path / 'a'}", f"checkpoint.dir={tmp_path / 'b'}")
    loaded = run_small(*both, "train.steps=4")
    assert (loaded["steps"], loaded["resumed_from_step"]) == (4, 0)
    resumed = run_small(*both, "train.steps=5")
    assert (resumed["steps"], resumed["resumed_from_step"]) == (5, 4)
    assert resumed["digest"] == run_small("train.steps=5")["digest"]


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("train.seed=1", "train.seed was 0, is 1"),
        ("model.top=[5]", "model.top was [4], is [5]"),
        ("pipeline.schedule=serial", 'pipeline.schedule was "nested", is "serial"'),
        ("dense_optimizer.lr=0.5", "dense_optimizer.lr was 0.001, is 0.5"),
        ("data.num_samples=5000", "data.num_samples was not set, is 5000"),
        ("runtime.dense_threads=2", "runtime.dense_threads was 1, is 2"),
    ],
)
def test_other_differences_are_refused(setting: str, text: str, tmp_path: Path) -> None:
    folder = f"checkpoint.dir={tmp_path}"
    run_small(folder, "train.steps=1")
    with pytest.raises(CheckpointError) as refused:
        run_small(folder, "train.steps=2", setting)
    assert text in str(refused.value)
    assert "--fresh" in str(refused.value)


def test_limits_may_be_raised(tmp_path: Path) -> None:
    """Limits that an error message tells the user to raise may differ. Other keys of a table may not."""
    recipe, folder = tmp_path / "recipe.toml", f"checkpoint.dir={tmp_path / 'out'}"
    table = "[[tables]]\nname = 'c10'\n"
    recipe.write_text(f"{table}max_rows = 40\n")
    with pytest.raises(ValueError, match="more than its max_rows = 40"):
        run_small(folder, "checkpoint.every=1", "train.steps=9", recipe=recipe)
    recipe.write_text(f"{table}max_rows = 4000\n")
    resumed = run_small(folder, "distributed.timeout_seconds=30", "train.steps=9", recipe=recipe)
    assert resumed["steps"] == 9
    assert resumed["resumed_from_step"] > 0
    recipe.write_text(f"{table}max_rows = 4000\nlr = 0.5\n")
    with pytest.raises(CheckpointError, match=r"tables.c10.lr was not set, is 0.5"):
        run_small(folder, "train.steps=9", recipe=recipe)


def test_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, best = tmp_path / "out", tmp_path / "best"
    settings = (f"checkpoint.dir={folder}", f"checkpoint.best={best}", "evaluate.every=1")
    for number in (1, 2):
        run_small(*settings, f"train.steps={number}", fresh=True)
        assert find_checkpoint(folder) == folder / f"step-{number:08d}"
    assert find_checkpoint(tmp_path / "out.1") == tmp_path / "out.1" / "step-00000001"
    assert find_checkpoint(tmp_path / "best.1") == tmp_path / "best.1" / "step-00000001"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restarted = run_small(*settings, "train.steps=3", fresh=True)
    assert (restarted["steps"], restarted["resumed_from_step"]) == (3, 2)
    assert not (tmp_path / "out.2").exists()


def test_fresh_moves_nothing_for_a_recipe_that_cannot_be_run(tmp_path: Path) -> None:
    """Fails if open_folders comes before the run is built."""
    folder = f"checkpoint.dir={tmp_path / 'out'}"
    run_small(folder, "train.steps=1")
    with pytest.raises(ConfigError):
        run_small(folder, "data.kind=parquet", fresh=True)
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="thesis"):
        run_small(folder, f"checkpoint.best={tmp_path / 'best'}", "evaluate.every=1", fresh=True)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["best", "out"]


def test_folders_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for key in ("dir", "best"):
        with pytest.raises(CheckpointError, match=r"is not a folder of checkpoints: it holds thesis.txt"):
            run_small(f"checkpoint.{key}={tmp_path}", "train.steps=100000", "evaluate.every=1")
    run_small(f"checkpoint.dir={tmp_path}/run", "train.steps=1")
    with pytest.raises(CheckpointError, match="is to hold the best model of a run, but it holds the checkpoints of a"):
        run_small(f"checkpoint.best={tmp_path}/run", "train.steps=1", "evaluate.every=1")
    with pytest.raises(ConfigError, match="the best model needs its own folder"):
        run_small(f"checkpoint.dir={tmp_path}/a", f"checkpoint.best={tmp_path}/b/../a", "evaluate.every=1")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["run", "thesis.txt"]


def test_validation_goes_on(tmp_path: Path) -> None:
    """Two runs together stop after the third evaluation. A stopped run trains nothing when resumed."""
    stops = ("evaluate.every=2", "evaluate.metric=num_samples", "evaluate.patience=2")
    folder = f"checkpoint.dir={tmp_path / 'out'}"
    run_small(folder, *stops, "train.steps=5")
    stopped = run_small(folder, *stops, "train.steps=20")
    assert (stopped["steps"], stopped["is_stopped_early"], stopped["resumed_from_step"]) == (6, True, 5)
    again = run_small(folder, *stops, "train.steps=20")
    assert (again["steps"], again["is_stopped_early"], again["resumed_from_step"]) == (6, True, 6)
    patient = run_small(folder, *stops[:2], "evaluate.patience=3", "train.steps=20")
    assert (patient["steps"], patient["is_stopped_early"]) == (8, True)


def test_threads_of_another_machine(tmp_path: Path) -> None:
    """A run without a setting for threads keeps the number it began with: bits depend on it."""
    run_small(f"checkpoint.dir={tmp_path}", "train.steps=1")
    config = load_config(None, (*SMALL, f"checkpoint.dir={tmp_path}", "train.steps=2"))
    adopted = with_saved_machine_keys(config, fresh=False).resolved(1, cores=64)
    assert (adopted.runtime.dense_threads, adopted.store.num_threads) == (1, 1)
    assert run(adopted, World())["resumed_from_step"] == 1
    assert with_saved_machine_keys(config, fresh=True) == config
    explicit = replace(config, runtime=replace(config.runtime, dense_threads=2))
    assert with_saved_machine_keys(explicit, fresh=False).runtime.dense_threads == 2
