"""The examples of the README do what they say, and it stays short. tests/docs runs those of the other documents."""

import re
from pathlib import Path
from xml.etree import ElementTree

from nestpipe.report.timeline import LEGEND, draw_timeline
from nestpipe.report.trace import COMPUTE, RankTrace, Span

ROOT = Path(__file__).parent.parent
MOST_BYTES = 60_000
"""Size of a picture."""


def test_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert examples
    for code in examples:
        exec(code, {})


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_pictures_are_small() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert "docs/timeline.svg" in pictures
    assert all(0 < (ROOT / picture).stat().st_size <= MOST_BYTES for picture in pictures)


def test_the_timeline_is_as_today_s_code_draws() -> None:
    """`make picture` draws it. Nested stands below serial, and is faster. Fails if a colour is changed, but not the
    picture."""
    picture = (ROOT / "docs" / "timeline.svg").read_text()
    trace = RankTrace("any", [Span(COMPUTE, "dense", batch, 0, float(batch), batch + 1.0) for batch in range(3)])
    head = re.compile(r"<style>.*?</style>|<rect[^>]* y=\"8\"[^>]*>\n<text.*?</text>", re.DOTALL)
    today = head.findall(draw_timeline([trace]))
    assert head.findall(picture) == today
    assert len(today) == 1 + len(LEGEND)
    texts = [element.text or "" for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    titles = [text for text in texts if " steps in " in text]
    assert [title.partition(":")[0] for title in titles] == ["serial", "nested"]
    assert re.search(r"2 steps in [\d,]+ ms, 1\.\d\d times as fast$", titles[1])
    assert {"compute", "rows", "gradients"} < set(texts), "lanes"
    assert any(re.fullmatch(r"\d+\.\d", text) for text in texts), "micro-batches"
