"""What a report reads of a run, whatever of its files there is."""

import json
from pathlib import Path

import pytest

from nestpipe.report.run_files import Curve, read_runs
from tests.report.runs import write_run, write_trace


def test_a_run(tmp_path: Path) -> None:
    """Fails if evaluations are taken for steps, or the hit rate is not that of each step."""
    (run,) = read_runs([write_run(tmp_path / "nested")])
    assert (run.name, run.number("step_ms"), run.number("schedule")) == ("nested", 20.0, None)
    assert (run.loss.steps, run.loss.values[-1]) == ([1, 2, 3, 4, 5, 6, 7, 8], 0.5)
    assert run.hit_rate.values == pytest.approx([0.1 * i for i in range(8)])
    assert run.metrics["auc"] == Curve([4, 8], [0.7, 0.75])
    assert run.trace is not None
    assert run.trace.lanes == ["compute", "host", "rows"]


@pytest.mark.parametrize("missing", ["summary.json", "steps.jsonl", "trace.json"])
def test_a_run_without_a_file(missing: str, tmp_path: Path) -> None:
    """Fails if a file that is not there is an error, or empties the others."""
    folder = write_run(tmp_path / "nested")
    (folder / missing).unlink()
    (run,) = read_runs([folder])
    assert (run.trace is None) == (missing == "trace.json")
    assert (run.number("steps") is None) == (missing == "summary.json")
    assert (len(run.loss.values) == 0) == (missing == "steps.jsonl")


def test_lines_of_a_run_that_was_killed(tmp_path: Path) -> None:
    """Fails if a line that cannot be read, or a number that is none, ends the reading."""
    folder = write_run(tmp_path / "nested")
    lines = ['{"step": 1, "loss": 0.9}', '{"step": 2, "loss": NaN}', "[]", "{}", '{"step": "x"}', '{"step": 3, "lo']
    (folder / "steps.jsonl").write_text("\n".join([*lines, "\x00", '{"step": 4, "loss": 0.7}']))
    (run,) = read_runs([folder])
    assert run.loss == Curve([1, 4], [0.9, 0.7])


def test_equal_names(tmp_path: Path) -> None:
    """Fails if two runs of one report have the same name."""
    folders = [write_run(tmp_path / parent / "log") for parent in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/log", "b/log"]
    assert [run.name for run in read_runs([folders[0], folders[0]])] == ["log (1)", "log (2)"]
    trace = write_trace(tmp_path / "serial.json", 10.0)
    assert [run.name for run in read_runs([trace, folders[0] / "trace.json"])] == ["serial", "log"]


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} has no summary.json, .* --set logging.dir={tmp_path}"):
        read_runs([tmp_path])
    for content in ("", "[]", "{"):
        (tmp_path / "summary.json").write_text(content)
        with pytest.raises(ValueError, match=r"summary\.json is not a summary that `nestpipe train` has written"):
            read_runs([tmp_path])
    with pytest.raises(FileNotFoundError):
        read_runs([tmp_path / "none"])


def test_blocks_of_a_long_curve() -> None:
    """Fails if the last, shorter block is lost, or weighs as much as the others."""
    curve = Curve(list(range(1, 11)), [float(step) for step in range(1, 11)])
    assert curve.blocks(10) == (curve, 1)
    assert curve.blocks(3) == (Curve([4, 8, 10], [2.5, 6.5, 9.5]), 4)
    assert Curve().blocks(3) == (Curve(), 1)


def test_a_summary_of_another_version(tmp_path: Path) -> None:
    """Fails if a field that is missing, or of another type, is an error."""
    folder = write_run(tmp_path / "nested")
    (folder / "summary.json").write_text(json.dumps({"step_ms": "fast", "steps": True, "ranks": 2}))
    (run,) = read_runs([folder])
    assert [run.number(name) for name in ("step_ms", "steps", "ranks", "none")] == [None, None, 2, None]
