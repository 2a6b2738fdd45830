"""Figures of a report, as Plotly describes them: parts of a step, bytes, and curves by step.

Names of runs and metrics come from files. Plotly reads a small part of HTML in texts, so they are escaped.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nestpipe.report.colours import light, run_colour
from nestpipe.report.run_files import Curve, RunFiles

Figure = dict[str, Any]
"""Traces and layout of a plot."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MOST_POINTS = 1000
"""Points of a curve; more would make a page of many megabytes, and no screen shows them."""
LONGEST_NAME = 22
"""Letters of a name that fit beside a number on a narrow screen."""

PARTS = {
    "dense": ("dense", ("dense_ms",)),
    "lookup": ("exposed lookup", ("exposed_lookup_ms",)),
    "exchange": ("exposed exchange", ("exposed_exchange_ms",)),
    "other": ("other", ("row_update_ms", "exposed_input_ms", "exposed_reduce_ms", "other_ms", "unattributed_ms")),
}
"""Parts of a step, by colour: the name, and the fields of the summary that add up to it."""
BYTES = {
    "exchanged_row_bytes_per_step": "rows to other ranks",
    "exchanged_gradient_bytes_per_step": "gradients to other ranks",
    "exchanged_key_bytes_per_step": "keys to other ranks",
    "retrieved_bytes_per_step": "rows from the host store",
    "written_back_bytes_per_step": "rows back to the host store",
}


def short(name: str) -> str:
    """Returns a name that is safe and fits; a long one loses its middle."""
    half = LONGEST_NAME // 2
    return escape(name if len(name) <= LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}")


def layout(height: float, **more: Any) -> dict[str, Any]:
    """Returns what the layouts of all figures share. Legends are in the page, where they wrap."""
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 0, "r": 16, "t": 8, "b": 32},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 13, "color": light("text")},
        "hoverlabel": {
            "bgcolor": light("panel"),
            "bordercolor": light("border"),
            "font": {"family": FONT, "color": light("text")},
            "align": "left",
            "namelength": -1,
        },
        "showlegend": False,
        **more,
    }


def axis(**more: Any) -> dict[str, Any]:
    """Returns what all axes share."""
    return {
        "gridcolor": light("grid"),
        "linecolor": light("border"),
        "zeroline": False,
        "tickfont": {"size": 12, "color": light("muted")},
        "automargin": True,
        **more,
    }


def heading(text: str, y: float, **more: Any) -> dict[str, Any]:
    """Returns a text above a row of a figure. `text` is safe already."""
    return {
        **{"text": text, "x": 0, "xref": "paper", "xanchor": "left", "y": y, "yanchor": "bottom"},
        **{"showarrow": False, "align": "left", "font": {"size": 13, "color": light("text")}},
        **{"bgcolor": light("paper"), "borderpad": 0},  # over the lines of the grid
        **more,
    }


def parts_figure(runs: Sequence[RunFiles]) -> Figure | None:
    """Draws a bar for each run, made of the parts of a step; None if no run has them."""
    timed = [run for run in runs if run.number("step_ms")]
    if not timed:
        return None
    traces = []
    for kind, (label, fields) in PARTS.items():
        lengths = [sum(run.number(name) or 0.0 for name in fields) for run in timed]
        traces.append(
            {
                **{"type": "bar", "orientation": "h", "name": label, "x": lengths, "y": list(range(len(timed)))},
                "marker": {"color": light(kind)},
                "width": 0.5,
                "text": [f"{length:,.1f}" if length else "" for length in lengths],
                **{"textposition": "inside", "insidetextanchor": "middle", "textangle": 0},
                "textfont": {"color": light("label"), "size": 12},
                "hovertext": [_part_hover(run, label, fields) for run in timed],
                "hoverinfo": "text",
            }
        )
    titles = [
        heading(f"<b>{short(run.name)}</b>  {run.number('step_ms'):,.1f} ms a step", number - 0.29, yref="y")
        for number, run in enumerate(timed)
    ]
    return {
        "data": traces,
        "layout": layout(
            52 + 62 * len(timed),
            barmode="stack",
            uniformtext={"mode": "hide", "minsize": 10},
            xaxis=axis(ticksuffix=" ms", rangemode="tozero", fixedrange=True),
            yaxis=axis(range=[len(timed) - 0.7, -0.75], visible=False, fixedrange=True),
            annotations=titles,
        ),
    }


def _part_hover(run: RunFiles, label: str, fields: Sequence[str]) -> str:
    step_ms = run.number("step_ms") or 0.0
    total = sum(run.number(name) or 0.0 for name in fields)
    lines = [f"<b>{short(run.name)}</b>", f"{label}: {total:,.2f} ms, {total / step_ms:.1%} of a step"]
    if len(fields) > 1:
        lines += [f"{name}: {run.number(name) or 0.0:,.2f}" for name in fields]
    return "<br>".join(lines)


def bytes_figure(runs: Sequence[RunFiles]) -> Figure | None:
    """Draws the bytes of a step, by their way, with a bar for each run; None if no run has them."""
    counted = [(number, run) for number, run in enumerate(runs) if any(run.number(name) is not None for name in BYTES)]
    if not counted:
        return None
    names = [name for name in BYTES if any(run.number(name) for _, run in counted)]
    width = 0.62 / len(counted)
    traces = []
    for place, (number, run) in enumerate(counted):
        sizes = [run.number(name) or 0.0 for name in names]
        hovers = [f"<b>{short(run.name)}</b><br>{BYTES[name]}: {size:,.0f} bytes a step" for name, size in
                  zip(names, sizes, strict=True)]  # fmt: skip
        traces.append(
            {
                **{"type": "bar", "orientation": "h", "name": short(run.name), "x": [size / 1e6 for size in sizes]},
                "y": [row + 0.36 + (place + 0.5) * width - 0.31 for row in range(len(names))],
                "width": width * 0.9,
                "marker": {"color": run_colour(number)},
                "text": [f"{size / 1e6:,.2f}" for size in sizes],
                **{"textposition": "auto", "insidetextanchor": "end", "textangle": 0, "cliponaxis": False},
                "insidetextfont": {"color": light("label"), "size": 12},
                "outsidetextfont": {"color": light("text"), "size": 12},
                **{"hovertext": hovers, "hoverinfo": "text"},
            }
        )
    titles = [heading(BYTES[name], row + 0.02, yref="y") for row, name in enumerate(names)]
    return {
        "data": traces,
        "layout": layout(
            40 + len(names) * (26 + 24 * len(counted)),
            xaxis=axis(ticksuffix=" MB", rangemode="tozero", fixedrange=True, nticks=6),
            yaxis=axis(range=[len(names) - 0.22, -0.35], visible=False, fixedrange=True),
            annotations=titles,
        ),
    }


def curves_figure(curves: Mapping[int, tuple[str, Curve]], form: str, has_marks: bool = False) -> Figure:
    """Draws a number by step. curves: name and curve of each run, by the run's place in the report.

    Schedules give the same losses, bit for bit. A curve that lies on an earlier one is dashed, so that both are seen.
    """
    traces: list[dict[str, Any]] = []
    for number, (name, curve) in curves.items():
        points, size = curve.blocks(MOST_POINTS)
        is_covering = any(trace["y"] == points.values for trace in traces)
        mean = f", mean of {size} steps" if size > 1 else ""
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if has_marks or len(points.steps) == 1 else "lines",
                **{"name": short(name), "x": points.steps, "y": points.values},
                "line": {"color": run_colour(number), "width": 2.5, "dash": "9px,9px" if is_covering else "solid"},
                "marker": {"size": 6 if is_covering else 9, "color": run_colour(number)},
                "hovertemplate": f"<b>{short(name)}</b><br>step %{{x:,d}}{mean}: %{{y:{form}}}<extra></extra>",
            }
        )
    return {
        "data": traces,
        "layout": layout(
            250,
            hovermode="closest",
            xaxis=axis(
                **{"rangemode": "tozero", "fixedrange": True, "tickformat": ",d", "nticks": 6},
                title={"text": "step", "font": {"size": 12, "color": light("muted")}, "standoff": 6},
            ),
            yaxis=axis(fixedrange=True, tickformat=form if form.endswith("%") else None, nticks=6),
            margin={"l": 0, "r": 16, "t": 8, "b": 40},
        ),
    }


def ceiling(figure: Figure, value: float, color: str) -> None:
    """Adds a dotted line: the best that a metric can be on this data."""
    figure["layout"].setdefault("shapes", []).append(
        {
            **{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value},
            "line": {"color": color, "width": 1.5, "dash": "dot"},
        }
    )
    figure["layout"].setdefault("annotations", []).append(
        heading(f"ceiling {value:.4g}", value, yref="y", x=1, xanchor="right", font={"size": 11, "color": color})
    )
