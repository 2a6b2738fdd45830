"""`nestpipe train` as a user calls it: recipes, ranks, summaries, and how it ends after failures."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice, pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.cli.main import app
from nestpipe.pipelining.schedule import operations
from nestpipe.pipelining.step_times import BYTE_FIELDS
from nestpipe.recipe.summary import TIME_FIELDS
from nestpipe.recipe.text import describe
from tests.forked import nestpipe
from tests.schedules import NESTED

SMALL = ("model.dim=8", "model.bottom=[16]", "model.top=[32]", "train.batch_size=64", "evaluate.num_samples=500")


def sets(settings: tuple[str, ...]) -> list[str]:
    return [word for setting in (*SMALL, *settings) for word in ("--set", setting)]


def start(*arguments: str, settings: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nestpipe", "train", *arguments, *sets(settings)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(*arguments: str, settings: tuple[str, ...] = (), expected: int = 0) -> str:
    """Returns the output, or the errors if an exit code other than 0 is expected. One rank runs in a fork."""
    if "--ranks" in arguments:
        process = start(*arguments, settings=settings)
        out, err = process.communicate(timeout=120)
    else:
        process = nestpipe("train", *arguments, *sets(settings))
        out, err = process.stdout, process.stderr
    assert process.returncode == expected, out + err
    return out if expected == 0 else err


def summary_of(path: Path, *arguments: str, settings: tuple[str, ...] = ()) -> dict:
    train("--json", str(path), *arguments, settings=settings)
    return json.loads(path.read_text())


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_summary(ranks: int, tmp_path: Path) -> None:
    """Fails if Trace.end_step leaves out a stage, so that parts do not add up to the step."""
    summary = summary_of(tmp_path / "a.json", "--ranks", str(ranks), settings=("train.steps=12",))
    for field in (*TIME_FIELDS, *BYTE_FIELDS, "step_ms", "samples_per_second", "peak_rss_bytes", "final_loss"):
        assert summary[field] >= 0, field
    assert (summary["schedule"], summary["ranks"], summary["num_micro_batches"]) == ("nested", ranks, 1)
    assert summary["steps"] == 12
    assert sum(summary[field] for field in TIME_FIELDS) == pytest.approx(
        summary["step_ms"], rel=0.3 if ranks > 1 else 1e-6
    )
    assert (summary["exchanged_row_bytes_per_step"] > 0) == (ranks > 1)
    assert summary["exchanged_row_bytes_per_step"] == summary["exchanged_gradient_bytes_per_step"]
    assert summary["retrieved_bytes_per_step"] > 0
    assert summary["written_back_bytes_per_step"] > 0
    assert set(summary["metrics"]) >= {"auc", "normalised_entropy", "log_loss", "auc_ceiling", "num_untrained_keys"}
    assert summary["metrics"]["num_samples"] == 500
    assert len(summary["tables"]) == 26


@pytest.mark.slow
@pytest.mark.parametrize("schedule", NESTED)
def test_trace_of_all_ranks_and_lanes(schedule: str, tmp_path: Path) -> None:
    """Fails if write_trace writes rank 0's spans only, or Trace._switch forgets a stage."""
    path = tmp_path / "trace.json"
    train("--ranks", "2", "--trace", str(path), settings=("train.steps=8", f"pipeline.schedule={schedule}"))
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    operations_of_two = {op.name[0] for op in islice(operations(schedule, 1), 40)} - {"begin"}
    for rank in (0, 1):
        mine = [span for span in spans if span["pid"] == rank]
        assert {span["name"] for span in mine} >= operations_of_two
        assert {span["args"]["batch"] for span in mine if span["name"] == "dense"} == set(range(8))
        lanes = {event["args"]["name"] for event in events if event["pid"] == rank and event["name"] == "thread_name"}
        assert lanes == {op.lane for op in islice(operations(schedule, 1), 40)}
        by_lane: dict[str, list[tuple[float, float]]] = {}
        for span in mine:
            by_lane.setdefault(span["cat"], []).append((span["ts"], span["ts"] + span["dur"]))
        for intervals in by_lane.values():  # a lane does one thing at a time
            intervals.sort()
            assert all(end <= begin + 1.0 for (_, end), (begin, _) in pairwise(intervals))


@pytest.mark.slow
def test_a_saved_config_repeats_the_run(tmp_path: Path) -> None:
    summary = summary_of(tmp_path / "a.json", settings=("train.steps=3", "row_optimizer.kind=adam"))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(summary["config"])
    assert summary_of(tmp_path / "b.json", str(recipe))["digest"] == summary["digest"]


@pytest.mark.slow
def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """The same command resumes after all processes were killed. Fails if run starts the data at the beginning again."""
    whole = summary_of(tmp_path / "a.json", "--ranks", "2", settings=("train.steps=40",))
    settings = ("train.steps=40", f"checkpoint.dir={tmp_path / 'save'}", "checkpoint.every=3", "logging.every=1")
    process = start("--ranks", "2", settings=settings)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 8"):
        assert process.poll() is None
    process.kill()
    process.communicate()
    rest = summary_of(tmp_path / "b.json", "--ranks", "2", settings=settings)
    assert rest["resumed_from_step"] in range(6, 40, 3)
    assert rest["digest"] == whole["digest"]
    again = summary_of(tmp_path / "c.json", "--ranks", "2", settings=settings)
    assert (again["resumed_from_step"], again["digest"]) == (40, whole["digest"])
    fresh = summary_of(tmp_path / "d.json", "--ranks", "2", "--fresh", settings=("train.steps=2", *settings[1:]))
    assert (fresh["resumed_from_step"], fresh["steps"]) == (0, 2)
    assert {child.name for child in tmp_path.glob("save*")} == {"save", "save.1"}


def test_data_that_ends_and_tables_of_a_recipe(tmp_path: Path) -> None:
    """Also covers progress lines, and a trace of some steps. Fails if train does not pass --trace-steps on."""
    recipe, trace, path = tmp_path / "recipe.toml", tmp_path / "trace.json", tmp_path / "a.json"
    recipe.write_text("[data]\nnum_samples = 150\n[[tables]]\nname = 'c03'\noptimizer = 'sgd'\nlr = 0.5\n")
    arguments = (str(recipe), "--trace", str(trace), "--trace-steps", "1:3", "--json", str(path))
    out = train(*arguments, settings=("train.steps=3", "logging.every=2"))
    lines = [line.split(",")[0] for line in out.splitlines() if line.startswith("step ")]
    assert lines == ["step 2 of 3", "step 3 of 3"]
    summary = json.loads(path.read_text())
    assert summary["steps"] == 3
    traced = json.loads(trace.read_text())
    about = traced["otherData"]
    assert (about["first_step"], about["end_step"]) == (1, 3)
    assert 0 < about["hit_rate"] < 1
    assert 0 < 8 * about["resident_rows"] <= about["resident_bytes"]
    assert summary["hit_rate"] == about["hit_rate"]
    assert {event["args"]["batch"] for event in traced["traceEvents"] if event["ph"] == "X"} == {1, 2}
    assert {table["name"]: table["state_bytes"] for table in summary["tables"]}["c03"] == 0


def test_list_keys_and_help() -> None:
    listed, text = (CliRunner().invoke(app, ["train", option]).stdout for option in ("--list-keys", "--help"))
    assert all(key.split(".")[0] in listed for key, *_ in describe())
    options = ("--set", "--ranks", "--json", "--list-keys", "--fresh", "--trace", "--trace-steps", "recipe")
    assert all(option in text for option in options)


def test_config_errors(tmp_path: Path) -> None:
    """They are reported before any rank is started."""

    def refused(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["train", "--ranks", "2", *arguments])
        assert done.exit_code == 2
        return done.output

    assert "unknown key train.step of --set; did you mean train.steps?" in refused("--set", "train.step=3")
    assert 'train.steps of --set is "many" (a string), must be an integer' in refused("--set", "train.steps=many")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[train]\nsteps = ")
    assert f"{recipe} is not valid TOML" in refused(str(recipe))
    assert "cannot be written" in refused("--json", str(tmp_path / "no" / "file.json"))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_errors_of_a_run_end_every_rank(ranks: int, tmp_path: Path) -> None:
    """tests/errors has errors on several ranks in every run of the tests."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[[tables]]\nname = 'c10'\nmax_rows = 100\n")
    err = train(str(recipe), *(("--ranks", str(ranks)) if ranks > 1 else ()), expected=1)
    assert "would have" in err
    assert "more than its max_rows = 100" in err
    assert err.count("nestpipe: ") == ranks, err


def rank_processes(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "--ppid", str(parent), "-o", "pid="], capture_output=True, text=True).stdout
    return [int(line) for line in listed.split()]


def started_run() -> tuple[subprocess.Popen[str], list[int]]:
    """Returns a run of two ranks that has reached its third step, and the processes of its ranks."""
    process = start("--ranks", "2", settings=("train.steps=100000", "logging.every=1"))
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 3"):
        assert process.poll() is None
    return process, rank_processes(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["interrupted", "killed", "stopped"])
def test_how_a_run_ends(kind: str) -> None:
    """As in test_launch.py, with slow starts. SIGTERM to one rank stops all in good order; the exit code is not 0 only
    because nothing was saved. Fails if on_this_rank does not handle SIGTERM."""
    process, ranks = started_run()
    assert len(ranks) == 2
    started = time.perf_counter()
    if kind == "interrupted":
        process.send_signal(signal.SIGINT)
    else:
        os.kill(ranks[1], signal.SIGKILL if kind == "killed" else signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert time.perf_counter() - started < 15
    assert process.returncode == {"interrupted": 130, "killed": 1, "stopped": 143}[kind], err
    text = {
        "interrupted": "interrupted (Ctrl-C)",
        "killed": "rank 1 failed: it was killed by SIGKILL",
        "stopped": "rank 1: SIGTERM received; stopping at the next step\nnestpipe: stopped by SIGTERM after ",
    }
    assert text[kind] in err
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


@pytest.mark.slow
def test_ranks_end_with_their_parent() -> None:
    """test_launch.py has the same with quick starts."""
    process, ranks = started_run()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(Path(f"/proc/{rank}").exists() for rank in ranks):
        time.sleep(0.1)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_an_unknown_device() -> None:
    text = train(settings=("runtime.device=gpu",), expected=2)
    assert "nestpipe: 'gpu' is not a device that torch knows" in text
    assert "Traceback" not in text
