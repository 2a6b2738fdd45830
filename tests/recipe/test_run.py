"""Evaluations while a recipe is trained: when they run, on which samples, and when they stop the training.

Fails, for example, if _train goes on with the next part after a stop, or if _evaluate does not begin at the first
held-out sample each time.
"""

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from nestpipe import World
from nestpipe.cli.show import NUM_LISTED, show_summary
from nestpipe.recipe.run import Summary, evaluate_saved, run
from nestpipe.recipe.text import load_config
from nestpipe.recipe.value import ConfigError

SMALL = ("model.dim=4", "model.bottom=[4]", "model.top=[4]", "train.batch_size=16", "evaluate.num_samples=40")


def run_small(*settings: str) -> Summary:
    return run(load_config(None, (*SMALL, *settings)).resolved(1, 1), World())


def test_what_no_longer_improves_is_stopped(tmp_path: Path) -> None:
    """The metric, the number of samples, never improves. The stop falls on the end of a part between checkpoints."""
    stops = ("train.steps=20", "evaluate.every=2", "evaluate.metric=num_samples", "evaluate.patience=2")
    saves = (f"checkpoint.dir={tmp_path / 'save'}", "checkpoint.every=3", f"checkpoint.best={tmp_path / 'best'}")
    stopped = run_small(*stops, *saves)
    assert (stopped["steps"], stopped["is_stopped_early"]) == (6, True)
    assert [validation["step"] for validation in stopped["validations"]] == [2, 4, 6]
    assert stopped["digest"] == run_small("train.steps=6")["digest"]
    best = evaluate_saved(load_config(None, SMALL).resolved(1, 1), World(), tmp_path / "best")
    assert best["steps"] == 2
    assert best["metrics"].items() < stopped["validations"][0].items()


def test_the_last_evaluation_is_that_of_the_end() -> None:
    every = run_small("train.steps=4", "evaluate.every=2")
    at_the_end = run_small("train.steps=4")
    assert every["metrics"] == at_the_end["metrics"]
    assert every["digest"] == at_the_end["digest"]
    assert at_the_end["validations"] == []


def test_the_report_has_the_memory_formula_and_the_peak() -> None:
    """Terms add up. Without a budget there is no report. Of many tables the largest are listed, and sums."""
    wide = ("model.dim=32", "train.batch_size=100")
    summary = run_small(*wide, "train.steps=6", "memory.device_budget_bytes=1000000000")
    memory = summary["device_memory"]
    terms = ("records", "lists", "kept_rows", "rows", "gradients", "messages")
    assert memory["formula_bytes"] == sum(memory[f"{term}_bytes"] for term in terms)
    assert 0.85 < memory["formula_bytes"] / memory["peak_bytes"] < 1.15
    assert memory["whole_device_peak_bytes"] is None
    shown = StringIO()
    show_summary(summary, Console(file=shown, width=120))
    assert f"by the formula │ {memory['formula_bytes'] / 1e6:.2f}" in shown.getvalue()
    assert f"at most        │ {memory['peak_bytes'] / 1e6:.2f}" in shown.getvalue()
    rows = [int(table["num_rows"]) for table in summary["tables"]]
    smaller = sum(sorted(rows)[:-NUM_LISTED])
    assert re.search(rf"{len(rows) - NUM_LISTED} smaller tables +│ +{smaller:,} │", shown.getvalue())
    assert re.search(rf"all tables +│ +{sum(rows):,} │", shown.getvalue())
    assert run_small("train.steps=1")["device_memory"] is None


def test_a_budget_that_is_too_small() -> None:
    with pytest.raises(ValueError, match=r"memory.device_budget_bytes, 0.00 MB: .* MB = .* records \(slots x \(row"):
        run_small("train.steps=4", "memory.device_budget_bytes=1000")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("evaluate.patience=3",), "evaluate.patience is set, but evaluate.every is 0"),
        (("checkpoint.best=never-made",), "checkpoint.best is set, but evaluate.every is 0"),
        (("evaluate.every=3", "evaluate.num_samples=0"), "evaluate.num_samples is 0: there is nothing to evaluate on"),
    ],
)
def test_settings_that_contradict_each_other(settings: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run_small("train.steps=1", *settings)


def test_unknown_metric() -> None:
    with pytest.raises(ValueError, match="there is no metric 'acu'; there are loss, num_samples"):
        run_small("train.steps=3", "evaluate.every=1", "evaluate.metric=acu")
