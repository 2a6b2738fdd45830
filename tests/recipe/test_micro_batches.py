"""pipeline.num_micro_batches = "auto": the number is chosen once, and stays that of the run.

Fails, for example, if set_micro_batches writes its file after the first step, if _saved does not read the number of the
newest checkpoint, or if _read takes the choice of another recipe.
"""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from nestpipe import World
from nestpipe.checkpoint import CheckpointError
from nestpipe.checkpoint.folder import checkpoints
from nestpipe.prediction import choose
from nestpipe.prediction.choose import Choice
from nestpipe.prediction.split_costs import SplitCosts
from nestpipe.recipe.micro_batches import FILE
from nestpipe.recipe.run import Summary, run
from nestpipe.recipe.text import load_config
from nestpipe.recipe.value import ConfigError
from nestpipe.train.fit_result import FitResult
from tests import ranks
from tests.prediction.test_measure import measure_quickly
from tests.recipe.test_checkpoint_keys import QUICK

AUTO = "pipeline.num_micro_batches=auto"


def train(world: World, chosen: int, dies_after: int, settings: Sequence[str]) -> tuple[str, int]:
    """Trains a recipe that would choose this number now, and dies after some steps unless it is 0."""

    def choice_by(measured: SplitCosts, candidates: Sequence[int]) -> Choice:
        return Choice(chosen + world.rank, "a test", {1: 2.0})

    def after_step(result: FitResult) -> None:
        if len(result.losses) == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    choose.choice_by = choice_by
    measure_quickly()
    summary = run(load_config(None, (*QUICK, *settings)).resolved(1, 1), world, after_step)
    return summary["digest"], summary["num_micro_batches"]


def resume_twice(world: World, folder: Path) -> dict[str, tuple[str, int]]:
    """Resumes a run that was killed, then once more without its file, and trains the same with a given number."""
    saved = (AUTO, f"checkpoint.dir={folder}")
    resumed = train(world, 4, 0, (*saved, "train.steps=2"))  # would choose another number now
    if world.rank == 0:
        (folder / FILE).unlink()
    return {
        "resumed": resumed,
        "again": train(world, 8, 0, (*saved, "train.steps=3")),
        "given": train(world, 8, 0, ("pipeline.num_micro_batches=2", "train.steps=2")),
        "given, longer": train(world, 8, 0, ("pipeline.num_micro_batches=2", "train.steps=3")),
    }


def test_a_killed_run_goes_on_with_its_number(tmp_path: Path) -> None:
    """Before its first checkpoint the file has the number, after it each checkpoint has."""
    folder = tmp_path / "out"
    processes, _ = ranks._start(2, train, (2, 1, (AUTO, f"checkpoint.dir={folder}", "train.steps=2")))
    for process in processes:
        process.join(timeout=ranks.limit_seconds)
    assert any(process.exitcode == -signal.SIGKILL for process in processes)
    assert (folder / FILE).exists()
    assert not checkpoints(folder)
    for results in ranks.run_ranks(2, resume_twice, folder):
        assert results["resumed"] == results["given"]
        assert results["again"] == results["given, longer"]
        assert {num for _, num in results.values()} == {2}


def run_alone(*settings: str) -> Summary:
    return run(load_config(None, (*QUICK, *settings)).resolved(1, 1), World())


def test_the_file_of_a_choice(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is printed once. Another recipe chooses anew; a damaged file is refused, with what to do."""
    folder, file = f"checkpoint.dir={tmp_path / 'out'}", tmp_path / "out" / FILE
    first = run_alone(AUTO, folder, "train.steps=1")
    assert first["num_micro_batches"] == 1
    text = first["splitting"]["text"]
    assert "one rank exchanges nothing" in text
    assert capfd.readouterr().out.count(text) == 1
    again = run_alone(AUTO, folder, "train.steps=2")
    assert again["splitting"] == first["splitting"]
    assert text not in capfd.readouterr().out
    content = json.loads(file.read_text())
    content["choice"]["num_micro_batches"] = 3  # not that of the checkpoint, and below not that of the recipe
    content["recipe"] = content["recipe"].replace("seed = 0", "seed = 1")
    file.write_text(json.dumps(content))
    assert run_alone(AUTO, folder, "train.steps=3")["num_micro_batches"] == 1
    other = tmp_path / "other"
    other.mkdir()
    for name in ("nestpipe-checkpoints.json", FILE):
        (other / name).write_text((tmp_path / "out" / name).read_text())
    assert run_alone(AUTO, f"checkpoint.dir={other}", "train.steps=1")["num_micro_batches"] == 1
    file.write_text(file.read_text()[:-9])
    with pytest.raises(CheckpointError, match="remove it to have the number chosen anew"):
        run_alone(AUTO, folder, "train.steps=4")


def test_a_given_number_chooses_nothing(tmp_path: Path) -> None:
    summary = run_alone("train.steps=1", f"checkpoint.dir={tmp_path / 'out'}", "pipeline.num_micro_batches=2")
    assert summary["num_micro_batches"] == 2
    assert summary["splitting"]["predicted_step_ms"] == {}
    assert not (tmp_path / "out" / FILE).exists()


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "true", "many", '""', "[2]"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.num_micro_batches of --set .*(auto|at least 1|give it a value)"):
        load_config(None, (f"pipeline.num_micro_batches={value}",))
