"""The timeline as a figure that can be zoomed: a few typical steps of each run, one above the other on one scale."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from nestpipe.report.colours import light
from nestpipe.report.figures import Figure, axis, heading, layout, short
from nestpipe.report.timeline import KIND_OF, LETTER
from nestpipe.report.trace import RankTrace, Span

LANE, TITLE, BOTTOM = 30, 40, 36
"""Height of a lane, of a run's title, and of the axis."""
USUAL_WIDTH = 950
"""Width of the drawing on a usual screen. It decides between long and short labels."""


def timeline_figure(traces: Sequence[tuple[str, RankTrace]], num_steps: int) -> Figure:
    """Draws some typical steps of each trace. Raises ValueError for a trace that has too few."""
    windows = [trace.typical_steps(num_steps) for _, trace in traces]
    longest = max(end - begin for begin, end in windows)
    inner = float(sum(TITLE + LANE * len(trace.lanes) for _, trace in traces))
    top, data, axes = inner, list[dict[str, Any]](), dict[str, Any]()
    shapes, titles = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, ((name, trace), window) in enumerate(zip(traces, windows, strict=True)):
        top -= TITLE
        bottom = top - LANE * len(trace.lanes)
        suffix = "" if number == 0 else str(number + 1)
        data += _bars(trace, window, longest, f"y{suffix}")
        axes[f"yaxis{suffix}"] = _lanes_axis(trace.lanes, (bottom / inner, top / inner))
        shapes += [*_backgrounds(trace.lanes, f"y{suffix}"), *_boundaries(trace, window, f"y{suffix}")]
        text = f"<b>{short(name)}</b>  {window[1] - window[0]:,.1f} ms"
        titles.append(heading(text, top / inner, yref="paper", yshift=6))
        top = bottom
    x_axis = axis(range=[0, longest], ticksuffix=" ms", nticks=5, tickangle=0, anchor="free", position=0)
    return {
        "data": data,
        "layout": layout(
            inner + BOTTOM,
            **{"barmode": "overlay", "shapes": shapes, "annotations": titles, "dragmode": "zoom"},
            uniformtext={"mode": "hide", "minsize": 10},
            margin={"l": 0, "r": 16, "t": 0, "b": BOTTOM},
            xaxis=x_axis,
            **axes,
        ),
    }


def describe(span: Span) -> str:
    """Returns what hovering over a span shows."""
    part = "" if span.micro_batch < 0 else f", micro-batch {span.micro_batch}"
    return (
        f"<b>{escape(span.stage)}</b>, batch {span.batch}{part}<br>"
        f"{span.end - span.begin:,.2f} ms on lane {escape(span.lane)}"
    )


def _bars(trace: RankTrace, window: tuple[float, float], longest: float, y_axis: str) -> Iterator[dict[str, Any]]:
    """Yields the bars of each kind of work."""
    by_kind: dict[str, list[Span]] = {}
    for span in trace.spans:
        if span.stage and span.end > window[0] and span.begin < window[1]:
            by_kind.setdefault(KIND_OF.get(span.stage, "other"), []).append(span)
    rows = {lane: row for row, lane in enumerate(trace.lanes)}
    for kind, spans in by_kind.items():
        begins = [max(span.begin, window[0]) - window[0] for span in spans]
        lengths = [min(span.end, window[1]) - window[0] - begin for span, begin in zip(spans, begins, strict=True)]
        yield {
            **{"type": "bar", "orientation": "h", "yaxis": y_axis, "name": kind, "width": 0.76},
            "base": [round(begin, 4) for begin in begins],
            "x": [round(length, 4) for length in lengths],
            "y": [rows[span.lane] for span in spans],
            "marker": {"color": light(kind), "line": {"color": _borders(kind, lengths, longest), "width": 0.5}},
            "text": [_label(span, length / longest) for span, length in zip(spans, lengths, strict=True)],
            **{"textposition": "inside", "insidetextanchor": "middle", "textangle": 0},
            "textfont": {"color": light("label"), "size": 11},
            "hovertext": [describe(span) for span in spans],
            "hoverinfo": "text",
        }


def _borders(kind: str, lengths: Sequence[float], longest: float) -> list[str]:
    """Returns the colour around each bar: the paper's, which separates bars without a gap between them.

    It would hide bars of a pixel or two. They have their own colour around them.
    """
    return [light("paper" if length / longest * USUAL_WIDTH > 3 else kind) for length in lengths]


def _label(span: Span, share: float) -> str:
    """Returns stage and place of a span, or its place alone if that is all that fits. share: of the drawing's width."""
    place = f"{span.batch}" if span.micro_batch < 0 else f"{span.batch}.{span.micro_batch}"
    label = f"{span.stage} {place}"
    return escape(label if len(label) * LETTER + 6 <= share * USUAL_WIDTH else place)


def _lanes_axis(lanes: Sequence[str], domain: tuple[float, float]) -> dict[str, Any]:
    return axis(
        **{"domain": list(domain), "range": [len(lanes) - 0.5, -0.5], "fixedrange": True, "showgrid": False},
        **{"tickvals": list(range(len(lanes))), "ticktext": [short(lane) for lane in lanes], "ticks": ""},
    )


def _backgrounds(lanes: Sequence[str], y_axis: str) -> Iterator[dict[str, Any]]:
    for row in range(len(lanes)):
        yield {
            **{"type": "rect", "layer": "below", "xref": "paper", "x0": 0, "x1": 1, "yref": y_axis},
            **{"y0": row - 0.43, "y1": row + 0.43, "fillcolor": light("lane"), "line": {"width": 0}},
        }


def _boundaries(trace: RankTrace, window: tuple[float, float], y_axis: str) -> Iterator[dict[str, Any]]:
    """Yields a line between steps."""
    for start in trace.step_starts():
        if window[0] < start < window[1]:
            x = start - window[0]
            yield {
                **{"type": "line", "xref": "x", "yref": f"{y_axis} domain", "x0": x, "x1": x, "y0": 0, "y1": 1},
                "line": {"color": light("muted"), "width": 1, "dash": "dot"},
            }
