"""`nestpipe report` draws the steps of a trace, each span in its lane at its time."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from nestpipe.cli.main import app
from nestpipe.pipelining.stage import STAGES
from nestpipe.report.timeline import KIND_OF, LEFT, RIGHT, WIDTH, draw_timeline
from nestpipe.report.trace import RankTrace, Span, read_trace

SVG = "{http://www.w3.org/2000/svg}"


def span(lane: int, name: str, batch: int, begin: float, end: float, micro_batch: int = -1) -> dict[str, Any]:
    """Returns an event of a trace file, in milliseconds."""
    place = {"batch": batch, "micro_batch": micro_batch}
    lanes = ("compute", "host")
    return {"ph": "X", "name": name, "cat": lanes[lane], "pid": 0, "tid": lane, "ts": 5e9 + 1e3 * begin,
            "dur": 1e3 * (end - begin), "args": place}  # fmt: skip


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    names = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": t, "args": {"name": name}}
             for t, name in enumerate(("compute", "host"))]  # fmt: skip
    other_rank = {**span(0, "dense", 0, 0, 999), "pid": 1}
    path.write_text(json.dumps({"traceEvents": [*names, other_rank, *events], "otherData": {}}))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Steps of 10 ms, but for one of 50. Rows of the next batch are retrieved meanwhile."""
    starts = [0, 10, 20, 70, 80, 90, 100]
    events = [span(0, "dense", batch, start, start + 9, 0) for batch, start in enumerate(starts)]
    events += [span(1, "retrieve", batch + 1, start + 1, start + 6) for batch, start in enumerate(starts)]
    return write(tmp_path / "nested.json", events)


def test_spans_of_a_file(trace: Path) -> None:
    """Fails if spans of other ranks are read, or times are not in milliseconds since the first span."""
    read = read_trace(trace)
    assert (read.name, read.lanes, len(read.spans)) == ("nested", ["compute", "host"], 14)
    assert read.spans[1] == Span("compute", "dense", 1, 0, 10.0, 19.0)
    assert read.step_starts() == [0, 10, 20, 70, 80, 90, 100]


def test_typical_steps_are_drawn(trace: Path) -> None:
    """Fails if the first steps are drawn whatever they took, or if batches begin with spans of other lanes."""
    begin, end = read_trace(trace).typical_steps(2)
    assert end - begin == 20
    with pytest.raises(ValueError, match="nested has 7 steps; to draw 7, it must have more"):
        read_trace(trace).typical_steps(7)


def test_the_same_scale(trace: Path, tmp_path: Path) -> None:
    """Fails if each run has a scale of its own, or if spans leave the drawing."""
    slow = write(tmp_path / "serial.json", [span(0, "dense", b, 40 * b, 40 * b + 40) for b in range(6)])
    drawing = draw_timeline([read_trace(slow), read_trace(trace)])
    assert drawing == draw_timeline([read_trace(slow), read_trace(trace)])
    root = ElementTree.fromstring(drawing)
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    widths = {(r.find(f"{SVG}title").text or "").split(":")[1].strip(): float(r.attrib["width"]) for r in bars}  # type: ignore[union-attr]
    assert widths["40.00 ms"] == pytest.approx((WIDTH - LEFT - RIGHT) / 2, abs=0.2)
    assert widths["9.00 ms"] == pytest.approx(widths["40.00 ms"] * 9 / 40, abs=0.2)
    for bar in bars:
        assert float(bar.attrib["x"]) >= LEFT - 0.1
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= WIDTH - RIGHT + 0.1
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert "serial: 2 steps in 80 ms" in texts
    assert "nested: 2 steps in 20 ms, 4.00 times as fast" in texts
    assert {"compute", "host"} <= set(texts)


def test_every_stage_has_a_colour() -> None:
    """Fails if a stage is added that the drawing does not know."""
    assert set(STAGES) - set(KIND_OF) == {"other", ""}
    spans = [Span("compute", "dense", batch, 0, float(batch), batch + 1.0) for batch in range(3)]
    drawing = draw_timeline([RankTrace("any", spans)])
    assert all(len(re.findall(rf"\.{kind} {{", drawing)) == 2 for kind in {*KIND_OF.values(), "other"})


def test_waits_are_pale_and_empty_lanes_are_left_out() -> None:
    """Fails if a wait of the compute lane looks like the work it waits for, or if a lane without a bar is drawn."""
    spans = [Span("compute", "dense", batch, 0, 10.0 * batch, 10.0 * batch + 6) for batch in range(4)]
    spans += [Span("compute", "send_rows", batch, -1, 10.0 * batch + 6, 10.0 * batch + 9) for batch in range(4)]
    alone = draw_timeline([RankTrace("any", spans)])
    assert alone.count('"exchange wait"') == 1, "in the legend"
    spans += [Span("rows", "send_rows", batch, 0, 10.0 * batch + 1, 10.0 * batch + 9) for batch in range(4)]
    spans.append(Span("upload", "upload", 0, -1, 0.0, 0.001))
    both = draw_timeline([RankTrace("any", spans)])
    assert both.count('"exchange wait"') == 1 + 2
    assert both.count("waits for send_rows") == 2
    assert ">rows<" in both
    assert ">upload<" not in both


def test_the_command(trace: Path, tmp_path: Path) -> None:
    """Fails if the runs of two folders have the same name."""
    out, folder = tmp_path / "out.svg", tmp_path / "slow run"
    folder.mkdir()
    trace.rename(folder / "trace.json")
    for given in (folder, folder / "trace.json"):
        done = CliRunner().invoke(app, ["report", str(given), "--out", str(out), "--steps", "3"])
        assert done.exit_code == 0, done.output
        assert "slow run: 3 steps" in out.read_text()


@pytest.mark.parametrize("content", ["", "{}", '{"traceEvents": [1]}', '{"traceEvents": []}', "\x00"])
def test_not_a_trace(content: str, tmp_path: Path) -> None:
    """Fails if an error is not caught, or leaves an empty picture."""
    (tmp_path / "a.json").write_text(content)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "a.json"), "--out", str(tmp_path / "out.svg")])
    assert done.exit_code == 2
    assert f"{tmp_path}/a.json" in done.stderr
    assert not (tmp_path / "out.svg").exists()
