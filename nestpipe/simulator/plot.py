"""Draws a number by number of workers, with a line for each way of training, as SVG. The same records give the same
text."""

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from nestpipe.simulator.simulate import Record

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP, LINE = 720, 220, 72, 16, 44, 84, 20
"""Width of the drawing, height of a panel, margins, space between panels, and height of a line of the legend."""
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#000000", "#999999", "#e69f00", "#666666", "#f0e442")
PANELS = {"step_ms": "ms a step", "scaling_efficiency": "scaling efficiency"}
"""Fields that are drawn, one above the other, and what their axes say."""
COLUMNS = 3
"""Entries in a line of the legend."""


def draw_scaling(records: Sequence[Record]) -> str:
    """Draws step time and efficiency."""
    if not records:
        raise ValueError("there is nothing to draw: simulate at least one number of workers")
    ways = list(dict.fromkeys(str(record["way"]) for record in records))
    colours = {way: COLOURS[i % len(COLOURS)] for i, way in enumerate(ways)}
    body: list[str] = []
    top = TOP
    for name, axis in PANELS.items():
        body += _panel(records, name, axis, colours, top)
        top += HEIGHT + GAP
    body += _legend(colours, top - GAP // 3)
    height = top + LINE * math.ceil(len(ways) / COLUMNS)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            f' font-family="{FONT}" font-size="13" fill="#24292f" role="img">',
            "<title>Simulated step time and scaling efficiency by number of workers</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(records: Sequence[Record], name: str, axis: str, colours: Mapping[str, str], top: int) -> Iterator[str]:
    numbers = sorted({int(record["workers"]) for record in records})
    places = {number: LEFT + (WIDTH - LEFT - RIGHT) * _place(number, numbers) for number in numbers}
    most = _round_up(max(float(record[name]) for record in records))
    yield f'<text x="{LEFT}" y="{top - 12}" font-weight="600">{escape(axis)}</text>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = top + HEIGHT * (1 - share)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">{most * share:g}</text>'
    for number, x in places.items():
        yield f'<text x="{x:.1f}" y="{top + HEIGHT + LINE}" text-anchor="middle">{number}</text>'
    for way, colour in colours.items():
        points = {int(r["workers"]): float(r[name]) for r in records if r["way"] == way}
        ends = [(places[n], top + HEIGHT * (1 - points[n] / most)) for n in numbers if n in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in ends:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" stroke="#ffffff"/>'


def _legend(colours: Mapping[str, str], top: int) -> Iterator[str]:
    width = (WIDTH - LEFT - RIGHT) / COLUMNS
    for i, (way, colour) in enumerate(colours.items()):
        x, y = LEFT + width * (i % COLUMNS), top + LINE * (i // COLUMNS)
        yield f'<circle cx="{x:.1f}" cy="{y - 4.5:.1f}" r="4" fill="{colour}"/>'
        yield f'<text x="{x + 10:.1f}" y="{y}">{escape(way)}</text>'


def _place(number: int, numbers: Sequence[int]) -> float:
    """Returns the place of a number on a logarithmic axis, with a margin."""
    low, high = math.log(numbers[0]), math.log(numbers[-1])
    return 0.5 if low == high else 0.06 + 0.88 * (math.log(number) - low) / (high - low)


def _round_up(value: float) -> float:
    """Returns the next number with quarters that are short to write."""
    step = 10.0 ** math.floor(math.log10(value))
    return next(step * factor for factor in (1, 2, 4, 6, 8, 10) if step * factor >= value * (1 - 1e-9))
