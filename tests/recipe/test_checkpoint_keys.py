"""The keys of [checkpoint]: how often, how many, complete or not, and what happens when a checkpoint fails.

Fails, for example, if Checkpoints does not pass on a key, or does not save again at the end what has failed.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from nestpipe import World
from nestpipe.checkpoint import CheckpointError
from nestpipe.checkpoint.manifest import read_manifest
from nestpipe.recipe.run import Summary, run
from nestpipe.recipe.text import load_config
from tests.ranks import run_ranks
from tests.recipe.test_run import SMALL

QUICK = (*SMALL, "evaluate.num_samples=0")


def run_quick(*settings: str, world: World | None = None) -> Summary:
    return run(load_config(None, (*QUICK, *settings)).resolved(1, 1), world or World())


def kinds(folder: Path) -> dict[int, str]:
    """Returns the steps of the checkpoints in a folder, and of which kind each is."""
    found = {}
    for checkpoint in sorted(folder.glob("step-????????")):
        base = read_manifest(checkpoint)["base"]
        found[int(checkpoint.name[5:])] = "complete" if base is None else f"since {int(base['name'][5:])}"
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), {7: "complete"}),
        (("every=3",), {6: "since 3", 7: "since 6", 3: "complete"}),
        (("every=1", "complete_every=3"), {4: "complete", 5: "since 4", 6: "since 5", 7: "complete"}),
        (("every=1", "complete_every=1", "keep=3"), {5: "complete", 6: "complete", 7: "complete"}),
        (("every=2", "keep=1", "complete_every=2"), {6: "complete", 7: "since 6"}),
    ],
    ids=str,
)
def test_what_is_kept(settings: tuple[str, ...], expected: dict[int, str], tmp_path: Path) -> None:
    keys = [f"checkpoint.{key}" for key in settings]
    run_quick(f"checkpoint.dir={tmp_path / 'out'}", *keys, "train.steps=7")
    assert kinds(tmp_path / "out") == expected


class FullDisk:
    """A disk that is full while the checkpoints of some steps are written, each as often as it is listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: Sequence[int], names: str) -> None:
        self.left, self.names, self.original = list(steps), names, os.writev
        self.failed: set[str] = set()
        monkeypatch.setattr(os, "writev", self.writev)

    def writev(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        step = int(file.parent.name[5:13])
        is_first_header = len(parts) == 1 and file.parent.name not in self.failed
        if step in self.left and (self.names == "blocks") != is_first_header:
            self.left.remove(step)
            self.failed.add(file.parent.name)
        if file.parent.name in self.failed:
            raise OSError(28, "No space left on device")
        return self.original(descriptor, parts)


@pytest.mark.parametrize("names", ["headers", "blocks"])
def test_on_error(names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """The disk is full when the files are opened, or later. Those of step 4 fail, and those of the last step once."""
    saves = ("checkpoint.every=2", "checkpoint.keep=9", "train.steps=8")
    expected = run_quick("train.steps=8")["digest"]
    FullDisk(monkeypatch, [4], names)
    with pytest.raises(CheckpointError, match="no space left on the disk"):
        run_quick(*saves, f"checkpoint.dir={tmp_path / 'stop'}")
    assert kinds(tmp_path / "stop") == {2: "complete"}
    capfd.readouterr()
    FullDisk(monkeypatch, [4, 8], names)
    goes_on = run_quick(*saves, f"checkpoint.dir={tmp_path / 'out'}", "checkpoint.on_error=continue")
    assert (goes_on["steps"], goes_on["digest"]) == (8, expected)
    assert kinds(tmp_path / "out") == {2: "complete", 6: "complete", 8: "complete"}
    errors = capfd.readouterr().err
    assert errors.count("no space left on the disk") == 2
    assert errors.count("; training goes on without this checkpoint") == 2
    again = run_quick(*saves, f"checkpoint.dir={tmp_path / 'out'}")
    assert (again["resumed_from_step"], again["digest"]) == (8, expected)


def test_strict(tmp_path: Path, capfd) -> None:
    """A model with another layer starts from what fits of a saved one, if it is told to."""
    run_quick(f"checkpoint.dir={tmp_path / 'a'}", "train.steps=2")
    changed = ("model.top=[4, 3]", f"checkpoint.load={tmp_path / 'a'}", "train.steps=3")
    with pytest.raises(CheckpointError, match="the order of the dense optimizer's parameters"):
        run_quick(*changed)
    capfd.readouterr()
    assert run_quick(*changed, "checkpoint.strict=false")["steps"] == 3
    report = capfd.readouterr().out
    assert "taken: table c00, table c01" in report
    assert "made new: dense top" in report


def resume_on(world: World, folder: Path, batch_size: int, steps: int) -> tuple[str, int, float]:
    try:
        summary = run_quick(
            f"checkpoint.dir={folder}", f"train.steps={steps}", f"train.batch_size={batch_size}", world=world
        )
    except CheckpointError as error:
        return str(error), 0, 0.0
    return summary["digest"], summary["resumed_from_step"], summary["final_loss"]


@pytest.mark.slow
def test_other_ranks_with_the_same_global_batch(tmp_path: Path) -> None:
    """Fails if _check_same_recipe compares the batch of a rank."""
    run_ranks(2, resume_on, tmp_path / "out", 8, 3)
    message, _, _ = resume_on(World(), tmp_path / "out", 8, 6)
    assert "2 ranks had a global batch of 16, 1 ranks must have the same one" in message
    _, resumed_from_step, loss = resume_on(World(), tmp_path / "out", 16, 6)
    assert resumed_from_step == 3
    assert loss == pytest.approx(resume_on(World(), tmp_path / "whole", 16, 6)[2], rel=1e-5)
