"""The folder of a run: a line for each step, the summary, the trace, events for TensorBoard."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nestpipe
from nestpipe import World
from nestpipe.recipe.run import Summary, run
from nestpipe.recipe.text import load_config
from nestpipe.recipe.value import ConfigError

SMALL = (
    *("model.dim=4", "train.batch_size=16", "evaluate.num_samples=64", "store.num_threads=1"),
    *("runtime.dense_threads=1", "runtime.device=cpu"),
)


def run_small(*settings: str) -> Summary:
    return run(load_config(None, (*SMALL, *settings)).resolved(1, 1), World())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_a_line_for_each_step(schedule: str, tmp_path: Path) -> None:
    """Fails if the last step is not written at the end, or an evaluation is not."""
    folder = tmp_path / "runs" / "a"
    summary = run_small(f"logging.dir={folder}", "train.steps=7", "evaluate.every=3", f"pipeline.schedule={schedule}")
    steps = [line for line in lines(folder) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert steps[-1]["loss"] == summary["final_loss"]
    assert all(line["num_samples"] == 16 and 0 < line["dense_ms"] <= line["step_ms"] for line in steps)
    validations = [line for line in lines(folder) if "loss" not in line]
    assert [line["step"] for line in validations] == [3, 6]
    assert validations[0]["validation/loss"] == summary["validations"][0]["loss"]
    assert json.loads((folder / "summary.json").read_text())["digest"] == summary["digest"]
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sorted(file.name for file in folder.iterdir()) == ["steps.jsonl", "summary.json", "trace.json"]


def test_the_environment_of_a_run(tmp_path: Path) -> None:
    """Fails if the summary does not say which versions and which machine it comes from."""
    run_small(f"logging.dir={tmp_path}", "train.steps=1")
    environment = json.loads((tmp_path / "summary.json").read_text())["environment"]
    assert (environment["nestpipe"], environment["torch"]) == (nestpipe.__version__, torch.__version__)
    assert environment["cores"] >= 1
    assert environment["cpu"]
    assert environment["device"] == "cpu"


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """Fails if lines of steps that are trained again stay, or if earlier lines are lost."""
    settings = f"logging.dir={tmp_path / 'log'}", f"checkpoint.dir={tmp_path / 'save'}"
    run_small(*settings, "train.steps=3")
    before = (tmp_path / "log" / "steps.jsonl").read_text()
    (tmp_path / "log" / "steps.jsonl").write_text(before + '{"step": 4, "loss": 9.0}\n{"step": 5, "lo')
    (tmp_path / "log" / "notes.txt").write_text("mine")
    run_small(*settings, "train.steps=5")
    assert (tmp_path / "log" / "steps.jsonl").read_text().startswith(before)
    assert [line["step"] for line in lines(tmp_path / "log")] == [1, 2, 3, 4, 5]
    assert lines(tmp_path / "log")[3]["loss"] != 9.0
    assert (tmp_path / "log" / "notes.txt").read_text() == "mine"
    written = {file.name: file.read_bytes() for file in (tmp_path / "log").iterdir()}
    run_small(*settings, "train.steps=5")  # complete
    assert {file.name: file.read_bytes() for file in (tmp_path / "log").iterdir()} == written
    run_small(f"logging.dir={tmp_path / 'log'}", "train.steps=2")
    assert [line["step"] for line in lines(tmp_path / "log")] == [1, 2]


def test_the_same_digest(tmp_path: Path) -> None:
    logged = run_small(f"logging.dir={tmp_path}", "train.steps=3", "logging.jsonl=false")
    assert logged["digest"] == run_small("train.steps=3")["digest"]
    assert not (tmp_path / "steps.jsonl").exists()


def test_events_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a resumed run purges nothing, or too much, or if the writer is not closed."""
    written: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            written.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def close(self) -> None:
            written.append("closed")

    module = ModuleType("torch.utils.tensorboard.writer")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", ModuleType("torch.utils.tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    settings = f"logging.dir={tmp_path / 'log'}", f"checkpoint.dir={tmp_path / 'save'}", "logging.tensorboard=true"
    for steps in (2, 3):
        run_small(*settings, f"train.steps={steps}")
    assert [entry for entry in written if entry[0] == str(tmp_path / "log" / "tensorboard")] == [
        (str(tmp_path / "log" / "tensorboard"), purged) for purged in (1, 3)
    ]
    assert written.count("closed") == 2
    assert [entry for entry in written if entry[0] == "loss"] == [("loss", 1), ("loss", 2), ("loss", 3)]


@pytest.mark.slow
def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    """Fails if events are not written to the folder, or not at their steps, or a resumed run leaves old ones."""
    from tensorboard.backend.event_processing import event_accumulator

    settings = f"logging.dir={tmp_path / 'log'}", f"checkpoint.dir={tmp_path / 'save'}", "logging.tensorboard=true"
    for steps in (2, 3):
        run_small(*settings, f"train.steps={steps}", "evaluate.every=2")
    events = event_accumulator.EventAccumulator(str(tmp_path / "log" / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert list(losses) == [1, 2, 3]
    assert losses == pytest.approx({line["step"]: line["loss"] for line in lines(tmp_path / "log") if "loss" in line})
    assert [event.step for event in events.Scalars("validation/auc")] == [2]
    assert {"step_ms", "dense_ms", "exposed_lookup_ms", "retrieved_bytes_per_step"} <= set(events.Tags()["scalars"])


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends the log and not the run. Fails if RunLog._write lets an OSError pass, or says it at every step."""
    original = Path.open

    class FullFile:
        """A file that takes two lines."""

        def __init__(self, file: Any) -> None:
            self.file, self.num_lines = file, 0

        def write(self, line: str) -> None:
            self.num_lines += 1
            if self.num_lines > 2:
                raise OSError(28, "No space left on device")
            self.file.write(line)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    def opened(path: Path, mode: str = "r", **options: Any) -> Any:
        file = original(path, mode, **options)
        return FullFile(file) if mode == "a" and path.name == "steps.jsonl" else file

    monkeypatch.setattr(Path, "open", opened)
    summary = run_small(f"logging.dir={tmp_path}", "train.steps=5")
    assert summary["steps"] == 5
    assert len(lines(tmp_path)) == 2
    assert capsys.readouterr().err.count("No space left on device; training goes on without a log") == 1


def test_nothing_is_moved_away_for_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    """Fails if the folder of the log is looked at after --fresh has moved the checkpoints."""
    saved = f"checkpoint.dir={tmp_path / 'save'}"
    run_small(saved, "train.steps=1")
    config = load_config(None, (*SMALL, saved, "train.steps=2", "logging.dir=/proc/none/log")).resolved(1, 1)
    with pytest.raises(ConfigError, match="cannot be written"):
        run(config, World(), fresh=True)
    assert [child.name for child in tmp_path.iterdir()] == ["save"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("logging.tensorboard=true",), "logging.dir, the folder for its events, is not set"),
        (("logging.dir=/proc/none/log",), "logging.dir is /proc/none/log, which cannot be written"),
    ],
)
def test_mistakes(settings: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run_small(*settings, "train.steps=1")


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ConfigError, match=r"pip install 'nestpipe\[tensorboard\]'"):
        run_small(f"logging.dir={tmp_path}", "logging.tensorboard=true", "train.steps=1")
