"""Two ranks, one of which reads slowly: the summary, the file in the folder of the run, `nestpipe monitor`."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nestpipe import World
from nestpipe.bench.monitor import workload
from nestpipe.bench.monitor.run import RECIPE
from nestpipe.cli.main import app
from nestpipe.recipe.run import run
from nestpipe.recipe.text import load_config
from tests.ranks import run_ranks

NUM_STEPS = 24


def train(world: World, recipe: Path, num_steps: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the section of the summary, and how many collectives each channel has stamped."""
    workload.trouble.reads_slowly = world.rank == 1
    workload.SLOW_READ_SECONDS, workload.READ_SECONDS, workload.NUM_PRODUCTS = 0.1, 0.001, 1
    settings = [f"logging.dir={recipe.parent / 'log'}", f"train.steps={num_steps}", "train.batch_size=64"]
    summary = run(load_config(recipe, settings).resolved(1, 1), world)
    return summary["slow"], [channel.stamps.count for channel in world.step_channels]


def test_the_rank_that_reads_slowly(tmp_path: Path) -> None:
    """Fails if only rank 0 returns what was found, or if a channel's thread does not stamp its collectives."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(seed=1, steps=NUM_STEPS))
    (slow, counts), (slow_there, counts_there) = run_ranks(2, train, recipe, NUM_STEPS)
    assert slow == slow_there
    assert [(each["kind"], each["ranks"]) for each in slow] == [("disk", [1])]
    assert "rank 1 enters the route at least" in slow[0]["text"]
    assert "its prefetch is slow" in slow[0]["text"]
    assert counts == counts_there
    assert all(count >= NUM_STEPS for count in counts)
    written = json.loads((tmp_path / "log" / "summary.json").read_text())
    assert written["slow"] == slow
    done = CliRunner().invoke(app, ["monitor", str(tmp_path / "log"), "--json", str(tmp_path / "slow.json")])
    assert done.exit_code == 0, done.output
    assert f"slow: {slow[0]['text']}; up to" in done.output.replace("\n", " ")
    assert "enters the route late by" in done.output
    assert json.loads((tmp_path / "slow.json").read_text()) == slow


def test_a_short_run_leaves_nothing(tmp_path: Path) -> None:
    """Fails if steps that warm up are looked at."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(seed=1, steps=4))
    assert [slow for slow, _ in run_ranks(2, train, recipe, 4)] == [[], []]
    done = CliRunner().invoke(app, ["monitor", str(tmp_path / "log")])
    assert done.exit_code == 2
    assert not (tmp_path / "log" / "monitor.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"ranks": []}', '{"ranks": [{"rank": 0}]}'])
def test_a_file_of_something_else(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "monitor.json").write_text(text)
    done = CliRunner().invoke(app, ["monitor", str(tmp_path)])
    assert done.exit_code == 2
    assert "is not a file that `nestpipe train` has written" in done.output + capfd.readouterr().err
