"""Draws a few steps of runs, one above the other on the same scale, as SVG. The same traces give the same text."""

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from nestpipe.report.colours import LIGHT_AND_DARK
from nestpipe.report.trace import COMPUTE, RankTrace, Span

WIDTH, LEFT, RIGHT = 960, 72, 12
LANE, GAP, TITLE, BAR = 24, 3, 40, 20
"""Height of a lane, of the space between lanes, of a run's title, and of a span."""
AXIS = 28
LETTER = 6.2
"""Width of a letter. A span has a label if it fits."""
LEAST_WIDTH = 0.3
"""Width of a span, below which it is not drawn."""
KINDS = {
    "dense": ("dense", "forward, backward, optimizer"),
    "lookup": ("lookup", "read, route keys, host rows"),
    "exchange": ("exchange", "rows and gradients"),
    "update": ("update", "of rows"),
    "reduce": ("reduce", "dense gradients"),
}
"""Kinds of work, by colour: name and what it is."""
LEGEND = {
    "dense": "dense",
    "lookup": "lookup: keys, host rows",
    "exchange": "exchange: rows, gradients",
    "update": "row update",
    "reduce": "dense reduction",
    "exchange wait": "pale: waits",
}
SHORT = {"send_rows": "rows", "return_gradients": "gradients"}
"""Names of stages in labels."""
KIND_OF = {
    **dict.fromkeys(("prefetch", "upload", "route", "retrieve", "write_back"), "lookup"),
    **dict.fromkeys(("begin", "send_early_rows", "send_rows", "return_gradients", "return_late_gradients"), "exchange"),
    "share_sums": "exchange",
    **dict.fromkeys(("sum_gradients", "update", "late_update"), "update"),
    **dict.fromkeys(("reduce", "commit"), "reduce"),
    "dense": "dense",
}
_FILLED = ("paper", "lane", "label", *KINDS, "other")


def _style() -> str:
    """Returns the rules of both colour schemes. A wait is a pale bar with dark letters."""
    rules = []
    for scheme in (0, 1):
        colours = {name: shades[scheme] for name, shades in LIGHT_AND_DARK.items()}
        rules.append(
            f"text {{ fill: {colours['text']} }} .grid {{ stroke: {colours['muted']} }}\n"
            + " ".join(f".{name} {{ fill: {colours[name]} }}" for name in _FILLED)
        )
    font = "text { font: 12px -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif }"
    sizes = ".title { font-weight: 600; font-size: 14px } .small { font-size: 11px } .label { pointer-events: none }"
    lines = ".start { stroke-dasharray: 2 3 } .wait { fill-opacity: 0.35 }"
    return f"\n{font}\n{sizes}\n{lines}\n{rules[0]}\n@media (prefers-color-scheme: dark) {{\n{rules[1]}\n}}\n"


def draw_timeline(traces: Sequence[RankTrace], num_steps: int = 2) -> str:
    """Draws some typical steps of each run. Hovering over a span, in a page that contains the drawing, names it."""
    windows = [trace.typical_steps(num_steps) for trace in traces]
    lengths = [end - begin for begin, end in windows]
    longest = max(lengths)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts: list[str] = []
    top = 28.0
    for trace, window, length in zip(traces, windows, lengths, strict=True):
        title = f"{trace.name}: {num_steps} steps in {length:,.0f} ms"
        faster = f", {lengths[0] / length:.2f} times as fast" if length < lengths[0] else ""
        lanes = _drawn_lanes(trace, window, scale)
        parts += _run(trace, window, scale, top, title + faster, lanes)
        top += TITLE + len(lanes) * (LANE + GAP)
    parts += _axis(longest, scale, top)
    height = top + AXIS
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="100%" role="img">',
            f"<title>{escape(' and '.join(trace.name for trace in traces))}: {num_steps} steps</title>",
            f"<style>{_style()}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height:g}"/>',
            *_legend(),
            *parts,
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    x = float(LEFT)
    for kind, text in LEGEND.items():
        yield f'<rect class="{kind}" x="{x:g}" y="8" width="11" height="11" rx="2"/>'
        yield f'<text class="small" x="{x + 15:.0f}" y="18">{escape(text)}</text>'
        x += 28 + LETTER * len(text)


def _drawn_lanes(trace: RankTrace, window: tuple[float, float], scale: float) -> list[str]:
    """Returns the lanes with anything to be seen."""
    seen = {span.lane for span in trace.spans if span.stage and _place(span, window, scale)[1] >= LEAST_WIDTH}
    return [lane for lane in trace.lanes if lane in seen]


def _place(span: Span, window: tuple[float, float], scale: float) -> tuple[float, float]:
    """Returns x and width of a span's bar; the width is negative if it lies outside of the window."""
    begin, end = max(span.begin, window[0]), min(span.end, window[1])
    return LEFT + (begin - window[0]) * scale, (end - begin) * scale


def _run(
    trace: RankTrace, window: tuple[float, float], scale: float, top: float, title: str, lanes: Sequence[str]
) -> Iterator[str]:
    elsewhere = {span.stage for span in trace.spans if span.lane != COMPUTE}
    has_parts = any(span.micro_batch > 0 for span in trace.spans)
    yield f'<text class="title" x="{LEFT}" y="{top + TITLE - 17:g}">{escape(title)}</text>'
    for number, lane in enumerate(lanes):
        y = top + TITLE - 8 + number * (LANE + GAP)
        yield f'<rect class="lane" x="{LEFT}" y="{y:g}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" rx="3"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 16:g}" text-anchor="end">{escape(lane)}</text>'
        for span in trace.spans:
            if span.lane == lane and span.stage:
                is_wait = lane == COMPUTE and span.stage in elsewhere
                yield from _bar(span, window, scale, y, has_parts, is_wait)
    bottom = top + TITLE - 8 + len(lanes) * (LANE + GAP) - GAP
    for x in [LEFT + (start - window[0]) * scale for start in trace.step_starts() if window[0] < start <= window[1]]:
        yield f'<line class="grid start" x1="{x:.1f}" x2="{x:.1f}" y1="{top + TITLE - 11:g}" y2="{bottom + 3:g}"/>'


def _bar(
    span: Span, window: tuple[float, float], scale: float, y: float, has_parts: bool, is_wait: bool
) -> Iterator[str]:
    """Draws a span with the longest label that fits. has_parts: there are several micro-batches. is_wait: another lane
    does it."""
    x, width = _place(span, window, scale)
    if width < LEAST_WIDTH:
        return
    part = "" if span.micro_batch < 0 else f"{span.micro_batch}"
    place = f"{span.batch}.{part}" if part and has_parts else f"{span.batch}"
    kind = KIND_OF.get(span.stage, "other") + (" wait" if is_wait else "")
    hover = f"{span.stage}, batch {span.batch}{f', micro-batch {span.micro_batch}' if part else ''}"
    yield (
        f'<rect class="{kind}" x="{x:.1f}" y="{y + (LANE - BAR) / 2:g}" width="{width:.1f}" height="{BAR}" rx="2">'
        f"<title>{'waits for ' if is_wait else ''}{escape(hover)}: {span.end - span.begin:.2f} ms</title></rect>"
    )
    for text in (f"{SHORT.get(span.stage, span.stage)} {place}", place, part):
        if text and len(text) * LETTER + 3 <= width:
            style = "small" if is_wait else "label small"
            middle = f'x="{x + width / 2:.1f}" y="{y + 16:g}" text-anchor="middle"'
            yield f'<text class="{style}" {middle}>{escape(text)}</text>'
            return


def _axis(longest: float, scale: float, top: float) -> Iterator[str]:
    tick = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if longest / size <= 12)
    for number in range(int(longest / tick) + 1):
        x = LEFT + number * tick * scale
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{top + 6:g}"/>'
        yield f'<text x="{x:.1f}" y="{top + 20:g}" text-anchor="middle">{number * tick:,} ms</text>'
