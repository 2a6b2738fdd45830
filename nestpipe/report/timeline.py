"""Draws a few steps of runs, one above the other on the same scale, as SVG. The same traces give the same text."""

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from nestpipe.report.trace import RankTrace, Span

WIDTH, LEFT, RIGHT = 960, 96, 16
LANE, GAP, TITLE, BAR = 24, 3, 34, 19
"""Height of a lane, of the space between lanes, of a run's title, and of a span."""
AXIS = 30
LETTER = 6.2
"""Width of a letter. A span has a label if it fits."""
KINDS = {
    "dense": ("dense", "forward, backward, optimizer"),
    "lookup": ("lookup", "read, route keys, host rows"),
    "exchange": ("exchange", "rows and gradients"),
    "update": ("update", "of rows"),
    "reduce": ("reduce", "dense gradients"),
}
"""Kinds of work, by colour: name and what it is."""
KIND_OF = {
    **dict.fromkeys(("prefetch", "upload", "route", "retrieve", "write_back"), "lookup"),
    **dict.fromkeys(("begin", "send_early_rows", "send_rows", "return_gradients", "return_late_gradients"), "exchange"),
    **dict.fromkeys(("sum_gradients", "update", "late_update"), "update"),
    **dict.fromkeys(("reduce", "commit"), "reduce"),
    "dense": "dense",
}
_STYLE = """
text { font: 12px -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 14px }
.paper { fill: #ffffff } .lane { fill: #f3f5f7 } .grid { stroke: #d0d7de }
.label { fill: #ffffff; font-size: 11px; pointer-events: none }
.dense { fill: #2166ac } .lookup { fill: #b35806 } .exchange { fill: #1b7837 }
.update { fill: #762a83 } .reduce { fill: #8c959f } .other { fill: #c4cad1 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .paper { fill: #0d1117 } .lane { fill: #161b22 } .grid { stroke: #30363d }
  .label { fill: #ffffff } .dense { fill: #4393c3 } .lookup { fill: #d9822b } .exchange { fill: #4dac26 }
  .update { fill: #9970ab }
}
"""


def draw_timeline(traces: Sequence[RankTrace], num_steps: int = 2) -> str:
    """Draws some typical steps of each run. Hovering over a span, in a page that contains the drawing, names it."""
    windows = [trace.typical_steps(num_steps) for trace in traces]
    longest = max(end - begin for begin, end in windows)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts: list[str] = []
    top = float(TITLE + 4)
    for trace, window in zip(traces, windows, strict=True):
        parts += _run(trace, window, scale, top, num_steps)
        top += TITLE + len(trace.lanes) * (LANE + GAP)
    parts += _axis(longest, scale, top)
    height = top + AXIS
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="100%" role="img">',
            f"<title>{escape(' and '.join(trace.name for trace in traces))}: {num_steps} steps</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height:g}"/>',
            *_legend(),
            *parts,
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    x = float(LEFT)
    for kind, (name, meaning) in KINDS.items():
        text = f"{name}: {meaning}"
        yield f'<rect class="{kind}" x="{x:g}" y="8" width="11" height="11" rx="2"/>'
        yield f'<text x="{x + 15:.0f}" y="18" style="font-size: 10.5px">{escape(text)}</text>'
        x += 28 + 5.1 * len(text)


def _run(trace: RankTrace, window: tuple[float, float], scale: float, top: float, num_steps: int) -> Iterator[str]:
    begin, end = window
    steps = f"{num_steps} steps in {end - begin:.0f} ms"
    yield f'<text class="title" x="{LEFT}" y="{top + TITLE - 16:g}">{escape(trace.name)}: {steps}</text>'
    for number, lane in enumerate(trace.lanes):
        y = top + TITLE - 8 + number * (LANE + GAP)
        yield f'<rect class="lane" x="{LEFT}" y="{y:g}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" rx="3"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 16:g}" text-anchor="end">{escape(lane)}</text>'
        for span in trace.spans:
            if span.lane == lane and span.stage and span.end > begin and span.begin < end:
                yield from _bar(span, window, scale, y)


def _bar(span: Span, window: tuple[float, float], scale: float, y: float) -> Iterator[str]:
    begin, end = max(span.begin, window[0]), min(span.end, window[1])
    x, width = LEFT + (begin - window[0]) * scale, (end - begin) * scale
    if width < 0.3:
        return
    part = "" if span.micro_batch < 0 else f".{span.micro_batch}"
    label = f"{span.stage} {span.batch}{part}"
    kind = KIND_OF.get(span.stage, "other")
    hover = f"{span.stage}, batch {span.batch}{f', micro-batch {span.micro_batch}' if part else ''}"
    yield (
        f'<rect class="{kind}" x="{x:.1f}" y="{y + (LANE - BAR) / 2:g}" width="{width:.1f}" height="{BAR}" rx="2">'
        f"<title>{escape(hover)}: {span.end - span.begin:.2f} ms</title></rect>"
    )
    for text in (label, f"{span.batch}{part}"):
        if len(text) * LETTER + 4 <= width:
            yield f'<text class="label" x="{x + 4:.1f}" y="{y + 16:g}">{escape(text)}</text>'
            return


def _axis(longest: float, scale: float, top: float) -> Iterator[str]:
    tick = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if longest / size <= 12)
    for number in range(int(longest / tick) + 1):
        x = LEFT + number * tick * scale
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{top + 6:g}"/>'
        yield f'<text x="{x:.1f}" y="{top + 20:g}" text-anchor="middle">{number * tick} ms</text>'
