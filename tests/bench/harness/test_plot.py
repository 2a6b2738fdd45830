"""The SVG writer: positions in the drawing, and refused values."""

import re
from xml.etree import ElementTree

import pytest

from nestpipe.bench.harness.plot import Series, strip_plot

SVG = "{http://www.w3.org/2000/svg}"


def marks(svg: str, num_series: int) -> list[tuple[float, float]]:
    """Returns the positions of the marks, in order, without those of the legend."""
    paths = ElementTree.fromstring(svg).findall(f"{SVG}path")
    places = [re.findall(r"-?[\d.]+", path.attrib["transform"]) for path in paths]
    return [(float(x), float(y)) for x, y in places[: len(places) - num_series]]


def zero_line(svg: str) -> float:
    lines = ElementTree.fromstring(svg).findall(f"{SVG}line")
    (zero,) = [line for line in lines if line.attrib["stroke-width"] == "1.5"]
    return float(zero.attrib["y1"])


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).findall(f"{SVG}text")]


def test_marks_are_at_their_values() -> None:
    """Fails if the axis points down, or if marks of one column share a place."""
    svg = strip_plot("t", "a", ["one", "two"], [Series("x", [[1.0], [-2.0]]), Series("y", [[0.0, 2.0], [0.0, 4.0]])])
    zero, at = zero_line(svg), marks(svg, 2)
    assert len(at) == 6
    (up, _), (down, _) = at[0], at[1]
    heights = [zero - y for _, y in at]
    unit = heights[0]
    assert unit > 0
    assert heights == pytest.approx([unit, -2 * unit, 0, 2 * unit, 0, 4 * unit], abs=0.3)
    xs = [x for x, _ in at]
    assert up < down  # columns from left to right
    assert sorted(xs) == [xs[i] for i in (0, 2, 3, 1, 4, 5)]
    assert len(set(xs)) == 6


def test_all_texts_are_drawn() -> None:
    svg = strip_plot("the title", "the axis", ["one", "two"], [Series("x", [[1.0], [-2.0]])])
    assert {"the title", "the axis", "one", "two", "x", "0", "+1", "-2"} <= set(texts(svg))
    assert "currentColor" not in svg
    assert '<rect width="720"' in svg  # its own background, white in a dark theme too


def test_text_is_escaped() -> None:
    svg = strip_plot('a < b & "c"', "x > y", ["<tag>"], [Series("p & q", [[1.0]])])
    assert [text for text in texts(svg) if not re.match(r"[+-]?\d", text)] == ['a < b & "c"', "x > y", "<tag>", "p & q"]


@pytest.mark.parametrize("value", [0.0, -0.0, 3.0, -1e-9, 12345.678])
def test_values_that_are_all_equal(value: float) -> None:
    svg = strip_plot("t", "a", ["one", "two"], [Series("x", [[value, value], [value, value]])])
    at, zero = marks(svg, 1), zero_line(svg)
    assert len({y for _, y in at}) == 1
    assert (at[0][1] == zero) == (value == 0)
    assert (at[0][1] < zero) == (value > 0)
    assert all(44 <= y <= 304 for _, y in at)


def test_a_single_mark() -> None:
    assert len(marks(strip_plot("t", "a", ["one"], [Series("x", [[0.25]])]), 1)) == 1


def test_a_category_without_values_is_empty() -> None:
    svg = strip_plot("t", "a", ["one", "two"], [Series("x", [[], [1.0]])])
    assert len(marks(svg, 1)) == 1


@pytest.mark.parametrize("low", [-7.3, 0.0, -1e-4])
@pytest.mark.parametrize("high", [0.3, 1.0, 9.99, 1e-7, 4e5])
def test_ticks_enclose_all_values(low: float, high: float) -> None:
    svg = strip_plot("t", "a", ["one"], [Series("x", [[low, high]])])
    labels = [text for text in texts(svg) if re.fullmatch(r"[+-]?[\d.]+(e[+-]\d+)?", text)]
    assert ("+" in "".join(label[0] for label in labels)) == (low < 0)  # signs only if values have both
    ticks = [float(label) for label in labels]
    assert ticks == sorted(ticks)
    assert ticks[0] <= low < high <= ticks[-1]
    assert 0 in ticks
    assert len(ticks) <= 10


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=rf"stale, two: {value} has no place in a plot"):
        strip_plot("t", "a", ["one", "two"], [Series("stale", [[1.0], [value]])])


def test_nothing_to_draw_is_refused() -> None:
    for series in ([], [Series("x", [[], []])]):
        with pytest.raises(ValueError, match="nothing to draw"):
            strip_plot("t", "a", ["one", "two"], series)


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="x has values for 1 categories, there are 2"):
        strip_plot("t", "a", ["one", "two"], [Series("x", [[1.0]])])
    with pytest.raises(ValueError, match="5 series cannot be told apart"):
        strip_plot("t", "a", ["one"], [Series(str(i), [[1.0]]) for i in range(5)])


def test_the_same_values_give_the_same_text() -> None:
    def drawn() -> str:
        return strip_plot("t", "a", ["one"], [Series("x", [[1 / 3, -2 / 3]])])

    assert drawn() == drawn()
    assert "-0" not in re.findall(r'[xy]\d?="([^"]+)"', drawn())
    assert drawn().endswith("</svg>\n")
