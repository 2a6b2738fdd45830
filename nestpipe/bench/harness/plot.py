"""Draws a plot as SVG: marks over categories, around a zero line. The same values give the same text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 260
"""Width of the whole drawing, and height of the field that holds the marks."""
LEFT, RIGHT, TOP, MARGIN, LINE = 72, 16, 44, 12, 20
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, GRID, BAND, PAPER = "#24292f", "#d0d7de", "#f6f8fa", "#ffffff"
STYLES = (
    ("#0072b2", "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z"),  # circle
    ("#009e73", "M-5,-5h10v10h-10z"),  # square
    ("#cc79a7", "M0,-6.5l6.5,6.5l-6.5,6.5l-6.5,-6.5z"),  # diamond
    ("#d55e00", "M0,-6l6.5,11h-13z"),  # triangle
)
MOST_INTERVALS = 7


@dataclass(frozen=True)
class Series:
    """Marks of one colour and shape."""

    name: str
    values: Sequence[Sequence[float]]
    """Values for each category. Several stand side by side."""


def strip_plot(title: str, axis: str, categories: Sequence[str], series: Sequence[Series]) -> str:
    """Draws a column for each category. Every mark has its own place in it, so equal values are seen side by side."""
    _check(categories, series)
    ticks = _ticks([value for one in series for values in one.values for value in values])
    body = [*_field(categories, ticks), *_marks(categories, series, ticks), *_legend(series)]
    height = TOP + HEIGHT + 2 * LINE + LINE * len(series) + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
            f' font-family="{FONT}" font-size="13" fill="{INK}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
            _text(WIDTH / 2, 26, title, "middle", ' font-size="15" font-weight="600"'),
            _text(0, 0, axis, "middle", f' transform="translate(20,{_number(TOP + HEIGHT / 2)}) rotate(-90)"'),
            *body,
            "</svg>\n",
        ]
    )


def _check(categories: Sequence[str], series: Sequence[Series]) -> None:
    if not any(values for one in series for values in one.values):
        raise ValueError("there is nothing to draw: give at least one value")
    if len(series) > len(STYLES):
        raise ValueError(f"{len(series)} series cannot be told apart; draw at most {len(STYLES)}")
    for one in series:
        if len(one.values) != len(categories):
            raise ValueError(f"{one.name} has values for {len(one.values)} categories, there are {len(categories)}")
        for category, values in zip(categories, one.values, strict=True):
            for value in values:
                if not math.isfinite(value):
                    raise ValueError(f"{one.name}, {category}: {value} has no place in a plot; leave it out or mend it")


def _ticks(values: Sequence[float]) -> list[float]:
    """Returns round numbers that enclose zero and all values."""
    low, high = min(0.0, *values), max(0.0, *values)
    if low == high:
        low, high = -1.0, 1.0
    least = (high - low) / MOST_INTERVALS
    exponent = f"{least:e}".partition("e")[2]
    step = next(step for digits in (1, 2, 5, 10) if (step := float(f"{digits}e{exponent}")) >= least)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _height_of(value: float, ticks: Sequence[float]) -> float:
    share = (value - ticks[0]) / (ticks[-1] - ticks[0])
    return TOP + HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)


def _field(categories: Sequence[str], ticks: Sequence[float]) -> list[str]:
    """Draws columns, grid and labels. The zero line is the dark one."""
    column = _column_width(categories)
    parts = []
    for number, category in enumerate(categories):
        left = LEFT + number * column
        size = f'width="{_number(column)}" height="{HEIGHT}"'
        parts.append(f'<rect x="{_number(left)}" y="{TOP}" {size} fill="{PAPER if number % 2 else BAND}"/>')
        parts.append(_text(left + column / 2, TOP + HEIGHT + LINE, category, "middle"))
    sign = "+" if ticks[0] < 0 else ""
    for tick in ticks:
        y, right = _number(_height_of(tick, ticks)), WIDTH - RIGHT
        colour, width = (INK, 1.5) if tick == 0 else (GRID, 1)
        line = f'<line x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="{width}"/>'
        parts += [line, _text(LEFT - 8, _height_of(tick, ticks) + 4.5, f"{tick:{sign}g}" if tick else "0", "end")]
    return parts


def _marks(categories: Sequence[str], series: Sequence[Series], ticks: Sequence[float]) -> list[str]:
    column = _column_width(categories)
    num_places = sum(max(map(len, one.values)) for one in series)
    parts, first = [], 0
    for one, style in zip(series, STYLES, strict=False):
        for number, values in enumerate(one.values):
            for place, value in enumerate(values, first):
                x = LEFT + column * (number + (place + 1) / (num_places + 1))
                parts.append(_mark(x, _height_of(value, ticks), style))
        first += max(map(len, one.values))
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    for number, (one, style) in enumerate(zip(series, STYLES, strict=False)):
        y = TOP + HEIGHT + 2 * LINE + MARGIN + number * LINE
        parts += [_mark(LEFT + 8, y - 4.5, style), _text(LEFT + 22, y, one.name, "start")]
    return parts


def _column_width(categories: Sequence[str]) -> float:
    return (WIDTH - LEFT - RIGHT) / len(categories)


def _mark(x: float, y: float, style: tuple[str, str]) -> str:
    colour, path = style
    place = f"translate({_number(x)},{_number(y)})"
    return f'<path d="{path}" transform="{place}" fill="{colour}" stroke="{PAPER}"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
