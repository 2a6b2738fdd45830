"""The page of `nestpipe report`: everything is in it, and nothing in it is taken from a file unescaped."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nestpipe.cli.main import app
from nestpipe.report.colours import LIGHT_AND_DARK
from nestpipe.report.page import write_page
from nestpipe.report.run_files import read_runs
from tests.report.runs import summary, write_run, write_trace

EVIL = "<script>alert(1)<\u2044script>&\"'$title"
"""A name as a folder may have, which no slash is part of."""


class Parsed(HTMLParser):
    """Elements of a page, its text, and the content of its scripts by id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self.feed(page)
        self.text = " ".join(" ".join(self.texts).split())
        self.figures: dict[str, Any] = json.loads(self.scripts["figures"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        last, attributes = self.tags[-1] if self.tags else ("", {})
        if last == "script":  # the first data is the content, later ones are behind the element
            self.scripts.setdefault(attributes.get("id"), data)
        if self.cdata_elem is None:
            self.texts.append(data)

    def all_texts(self) -> list[str]:
        """Returns every text of the figures that Plotly draws."""
        return list(_texts(self.figures))


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(part)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / "serial", 30.0), write_run(tmp_path / "nested", 20.0)]


def test_the_page(folders: list[Path], tmp_path: Path) -> None:
    """Fails if a run, a part of it or a figure is left out, or if runs change places."""
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", *map(str, folders), "--out", str(out)])
    assert done.exit_code == 0, done.output
    page = Parsed(out.read_text())
    assert set(page.figures) == {"timeline", "parts", "hit-rate", "bytes", "loss", "metric-1"}
    assert {tag["id"] for name, tag in page.tags if tag.get("class") == "plot"} == set(page.figures)
    for text in ("serial and nested", "2 typical steps of each run", "1.50 times as fast as serial",
                 "nested, 2 ranks, 2 micro-batches", "25.0%", "Some CPU", "00ff" * 16,
                 "pipeline. schedule", "Recipe of serial"):  # fmt: skip
        assert text in page.text, text
    titles = [a["text"] for a in page.figures["timeline"]["layout"]["annotations"]]
    assert titles == ["<b>serial</b>  60.0 ms", "<b>nested</b>  40.0 ms"]
    tops = [page.figures["timeline"]["layout"][name]["domain"][1] for name in ("yaxis", "yaxis2")]
    assert tops[0] > tops[1]
    assert write_page(read_runs(folders)) == out.read_text()


def test_spans_of_the_timeline(folders: list[Path]) -> None:
    """Fails if bars are not at their times on one scale, in their lanes, or name another span."""
    timeline = Parsed(write_page(read_runs(folders))).figures["timeline"]
    assert timeline["layout"]["xaxis"]["range"] == [0, 60]
    dense = next(t for t in timeline["data"] if t["name"] == "dense" and t["yaxis"] == "y2")
    assert (dense["base"], dense["x"]) == ([0, 10, 20, 30], [8, 8, 8, 8])
    assert dense["y"] == [0, 0, 0, 0]
    assert timeline["layout"]["yaxis2"]["ticktext"] == ["compute", "host", "rows"]
    assert re.fullmatch(r"<b>dense</b>, batch \d, micro-batch 1<br>8.00 ms on lane compute", dense["hovertext"][1])
    assert re.fullmatch(r"dense \d\.0", dense["text"][0])


def test_parts_of_a_step(folders: list[Path]) -> None:
    """Fails if a field of the summary is in no part, or in two."""
    bars = {trace["name"]: trace["x"] for trace in Parsed(write_page(read_runs(folders))).figures["parts"]["data"]}
    assert list(bars) == ["dense", "exposed lookup", "exposed exchange", "other"]
    assert [sum(bar[number] for bar in bars.values()) for number in (0, 1)] == pytest.approx([30.0, 20.0])
    assert bars["other"] == pytest.approx([1.5, 1.0])


def test_equal_curves_are_both_seen(tmp_path: Path) -> None:
    """Fails if a curve hides another one that is equal, or is dashed without need."""
    runs = [write_run(tmp_path / name, losses=losses) for name, losses in
            (("a", (1.0, 0.5)), ("b", (1.0, 0.5)), ("c", (1.0, 0.6)))]  # fmt: skip
    dashes = [trace["line"]["dash"] for trace in Parsed(write_page(read_runs(runs))).figures["loss"]["data"]]
    assert dashes == ["solid", "9px,9px", "solid"]


def test_only_a_trace(tmp_path: Path) -> None:
    """Fails if the page of a trace needs a summary or steps."""
    page = Parsed(write_page(read_runs([write_trace(tmp_path / "a.json", 10.0)])))
    assert set(page.figures) == {"timeline"}
    assert "trace only" in page.text
    assert "Environment" not in page.text


def test_a_trace_with_few_steps(folders: list[Path], tmp_path: Path) -> None:
    """Fails if one short trace keeps the others from being drawn."""
    short = write_trace(tmp_path / "short.json", 10.0, num_steps=2)
    page = Parsed(write_page(read_runs([short, folders[0]]), num_steps=2))
    assert "short is not drawn: its trace has 2 steps, and must have more than 2" in page.text
    assert len(page.figures["timeline"]["layout"]["annotations"]) == 1


def test_everything_is_escaped(tmp_path: Path) -> None:
    """Fails if a name from a file can add an element, end a script, or reach Plotly's own HTML."""
    folder = write_run(
        tmp_path / EVIL,
        environment={EVIL: EVIL}, metrics={EVIL: 0.5}, config=EVIL, backend=EVIL,
    )  # fmt: skip
    (folder / "steps.jsonl").write_text(json.dumps({"step": 1, f"validation/{EVIL}": 0.5, "loss": 1.0}))
    trace = (folder / "trace.json").read_text()
    (folder / "trace.json").write_text(trace.replace('"host"', json.dumps(EVIL)).replace('"dense"', json.dumps(EVIL)))
    page = write_page(read_runs([folder]))
    parsed = Parsed(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 4
    assert "alert(1)" in parsed.text
    assert "<script>alert" not in page
    assert "alert(1)" in "".join(parsed.all_texts())
    assert not [text for text in parsed.all_texts() if "<script" in text]
    assert all(not name.startswith("on") for _, attributes in parsed.tags for name in attributes)


def test_nothing_is_loaded(folders: list[Path]) -> None:
    """Fails if the page needs another file or the network."""
    page = Parsed(write_page(read_runs(folders)))
    assert not [a for _, a in page.tags if a.get("src") or (a.get("href") or "data:").partition(":")[0] != "data"]
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_colours() -> None:
    """Fails if a light colour stands for two things, of which one would then have the other's dark colour."""
    shades = [light for light, _ in LIGHT_AND_DARK.values()]
    assert len(set(shades)) == len(shades)


def test_figures_have_colours_of_the_table_only(folders: list[Path]) -> None:
    """Fails if a figure has a colour that the page cannot exchange for a dark one."""
    texts = Parsed(write_page(read_runs(folders))).all_texts()
    used = {text for text in texts if re.fullmatch(r"#[0-9a-f]{6}", text)}
    assert used <= {light for light, _ in LIGHT_AND_DARK.values()}


def test_damaged_numbers(tmp_path: Path) -> None:
    """Fails if a summary with other types than expected has no page."""
    folder = write_run(tmp_path / "odd")
    odd = {**summary("odd", 10.0), "metrics": [1], "environment": 7, "config": 3, "step_ms": None, "hit_rate": "high"}
    (folder / "summary.json").write_text(json.dumps(odd))
    assert set(Parsed(write_page(read_runs([folder]))).figures) == {"timeline", "hit-rate", "bytes", "loss", "metric-1"}


def test_without_plotly(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", str(folders[0]), "--out", str(out)])
    assert done.exit_code == 2
    assert "pip install 'nestpipe[report]'" in " ".join(done.stderr.split())
    assert not out.exists()
    done = CliRunner().invoke(app, ["report", str(folders[0]), "--out", str(tmp_path / "report.svg")])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", ["report", "report.png", "report.html.txt"])
def test_another_suffix(name: str, folders: list[Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(folders[0]), "--out", str(tmp_path / name)])
    assert done.exit_code == 2
    assert "must end in .html, for a page, or in .svg" in " ".join(done.stderr.split())
    assert not (tmp_path / name).exists()
