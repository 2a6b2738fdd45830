"""`--plot` of `bench consistency` and `bench redraw`, without training."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nestpipe.bench import store
from nestpipe.bench.consistency import run
from nestpipe.bench.consistency.figures import plot, table
from nestpipe.bench.harness.report import Record
from nestpipe.cli.bench import make_app
from tests.bench.consistency.test_figures import whole_run

runs: list[bool] = []
"""`quick` of every run of the benchmark, whose records are made up."""


def records(quick: bool) -> Iterator[Record]:
    runs.append(quick)
    yield from whole_run()


def call(*arguments: object) -> Result:
    app = make_app([replace(run.BENCHMARK, records=records), store.BENCHMARK])
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(autouse=True)
def _no_runs() -> None:
    runs.clear()


def test_plot_is_written_after_the_run_and_drawn_again(tmp_path: Path) -> None:
    json, first, second = (tmp_path / name for name in ("x.json", "first.svg", "second.svg"))
    done = call("consistency", "--quick", "--json", json, "--plot", first)
    assert done.exit_code == 0, done.output
    assert first.read_text() == plot(whole_run())
    again = call("redraw", json, "--plot", second)
    assert (again.exit_code, again.stdout) == (0, table(whole_run()) + "\n")
    assert second.read_text() == first.read_text()
    assert call("redraw", json).stdout == again.stdout
    assert runs == [True]


def test_without_plot_nothing_is_drawn(tmp_path: Path) -> None:
    assert call("consistency", "--quick", "--json", tmp_path / "x.json").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert runs == [True]


def test_a_plot_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    """Fails if the file is checked only after the measurement."""
    json = tmp_path / "x.json"
    for file, text in (
        (tmp_path / "missing" / "x.svg", "of --plot does not exist"),
        (tmp_path, "of --plot cannot be written"),
        (json, "is the file of the records"),
    ):
        done = call("consistency", "--quick", "--json", json, "--plot", file)
        assert done.exit_code == 2
        assert text in " ".join(done.output.replace("│", " ").split())
    assert runs == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "FileNotFoundError"),
        ("not json", "is not a result of"),
        ("[1]", "is not a result of"),
        ('{"bench": "store", "records": []}', "a result of bench store, not of bench consistency"),
    ],
)
def test_redraw_refuses_other_files(content: str | None, text: str, tmp_path: Path) -> None:
    result, svg = tmp_path / "x.json", tmp_path / "x.svg"
    if content is not None:
        result.write_text(content)
    done = call("redraw", result, "--plot", svg)
    assert done.exit_code == 2
    assert text in " ".join(done.output.replace("│", " ").split())
    assert not svg.exists()


def test_help() -> None:
    assert "--plot" in call("consistency", "--help").output
    assert "--plot" in call("redraw", "--help").output
    assert "--plot" not in call("store", "--help").output
