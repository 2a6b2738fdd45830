"""The trace file: the steps that a user asks for, and the content of the file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe import World
from nestpipe.cli.main import app
from nestpipe.pipelining.trace import Span
from nestpipe.recipe.trace_file import parse_steps, write_trace


@pytest.mark.parametrize("text", ["", "5", "5:", ":5", "5:5", "6:5", "-1:5", "a:b", "1:2:3"])
def test_steps_that_are_refused(text: str) -> None:
    """Fails if parse_steps accepts an empty range."""
    with pytest.raises(ValueError, match="must be A:B with A < B; 100:200 are steps 100 to 199"):
        parse_steps(text)
    assert parse_steps("5:7") == range(5, 7)


def test_wrong_options(tmp_path: Path) -> None:
    for arguments, text in (
        (("--trace-steps", "1:2"), "--trace, the file to write it to, is missing"),
        (("--trace", str(tmp_path / "t.json"), "--trace-steps", "2:1"), "must be A:B with A < B"),
    ):
        result = CliRunner().invoke(app, ["train", *arguments])
        assert result.exit_code == 2
        assert text in " ".join(result.output.split())


def test_an_empty_trace_warns(tmp_path: Path) -> None:
    """Fails if write_trace does not warn: a file without spans looks like a fault."""
    with pytest.warns(UserWarning, match="the trace is empty: steps 50 to 59 were not trained"):
        write_trace([], World(), tmp_path / "t.json", range(50, 60))
    write_trace([Span("compute", "dense", 50, 0, 1000, 3000)], World(), tmp_path / "t.json", range(50, 60))
    written = json.loads((tmp_path / "t.json").read_text())
    assert written["otherData"] == {"first_step": 50, "end_step": 60}
    assert [event["dur"] for event in written["traceEvents"] if event["ph"] == "X"] == [2.0]
