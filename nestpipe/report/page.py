"""Writes runs as one page that needs nothing else: style, script, plotting library and data are inside it."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from nestpipe.report.blocks import cards, environment, legend, numbers, recipes
from nestpipe.report.colours import css_variables, dark_by_light, light, run_colour
from nestpipe.report.figures import PARTS, Figure, bytes_figure, ceiling, curves_figure, parts_figure
from nestpipe.report.metric_names import metric_names
from nestpipe.report.run_files import RunFiles
from nestpipe.report.timeline import KINDS
from nestpipe.report.timeline_figure import timeline_figure
from nestpipe.report.trace import RankTrace

ASSETS = Path(__file__).parent / "assets"
NOT_METRICS = ("num_samples", "num_untrained_keys")
CEILING = "_ceiling"
"""Ending of the name of the best value that a metric can have on synthetic data."""


class Page:
    """Sections of a page, and the figures in them."""

    def __init__(self) -> None:
        self.sections: list[str] = []
        self.figures: dict[str, Figure] = {}

    def plot(self, name: str, figure: Figure, label: str) -> str:
        """Takes a figure, and returns its place in the page."""
        self.figures[name] = figure
        height = figure["layout"]["height"]
        return (
            f'<div class="plot" id="{name}" role="img" aria-label="{escape(label)}" style="height: {height:g}px"></div>'
        )


def write_page(runs: Sequence[RunFiles], num_steps: int = 2) -> str:
    """Returns the page. The same files give the same text. Raises ValueError if Plotly is not installed."""
    page = Page()
    page.sections.append(cards(runs))
    _add_timeline(page, runs, num_steps)
    _add_parts(page, runs)
    _add_pool_and_bytes(page, runs)
    _add_curves(page, runs)
    page.sections += [environment(runs), numbers(runs), recipes(runs)]
    library, figures = _plotly(page.figures)
    template = Template((ASSETS / "page.html").read_text())
    return template.substitute(
        title=escape(_title([run.name for run in runs])),
        style=css_variables() + (ASSETS / "page.css").read_text(),
        sections="\n".join(section for section in page.sections if section),
        figures=_in_script(figures),
        dark=_in_script(json.dumps(dark_by_light())),
        library=library,
        script=(ASSETS / "page.js").read_text(),
    )


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _plotly(figures: dict[str, Figure]) -> tuple[str, str]:
    """Returns the plotting library's script, and the figures, which it has checked, as JSON."""
    try:
        from plotly.graph_objects import Figure as PlotlyFigure
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError(
            "a page needs Plotly; install it with `pip install 'nestpipe[report]'`, or write an .svg"
        ) from None
    checked: dict[str, Any] = {
        name: json.loads(PlotlyFigure(figure).to_json(engine="json")) for name, figure in figures.items()
    }
    return get_plotlyjs(), json.dumps(checked)


def _in_script(text: str) -> str:
    """Returns JSON in which no text can end the element that holds it."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(title: str, about: str, *content: str) -> str:
    return f'<section><h2>{title}</h2><p class="about">{about}</p>{"".join(content)}</section>'


def _run_legend(runs: Sequence[RunFiles]) -> str:
    return legend([(run_colour(number), run.name, "") for number, run in enumerate(runs)]) if len(runs) > 1 else ""


def _add_timeline(page: Page, runs: Sequence[RunFiles], num_steps: int) -> None:
    drawn: list[tuple[str, RankTrace]] = []
    notes = []
    for run in runs:
        if run.trace is None:
            continue
        if len(run.trace.step_starts()) > num_steps:
            drawn.append((run.name, run.trace))
        else:
            text = f"{run.name} is not drawn: its trace has {len(run.trace.step_starts())} steps, and must have more"
            notes.append(f'<p class="note">{escape(text)} than {num_steps}. `--steps` sets how many are drawn.</p>')
    if not drawn and not notes:
        return
    kinds = [(light(kind), name, meaning) for kind, (name, meaning) in KINDS.items()]
    kinds.append((light("other"), "other", "work of the host"))
    plot = page.plot("timeline", timeline_figure(drawn, num_steps), "timeline of steps") if drawn else ""
    about = (
        f"{num_steps} typical {'steps' if num_steps > 1 else 'step'} of each run, all on one scale. A row is a lane; a "
        "bar is an operation on batch.micro-batch, and on the compute lane also a wait for it. Hover for details, drag "
        "to zoom, double-click to zoom out."
    )
    page.sections.append(_section("Timeline", about, legend(kinds), plot, *notes))


def _add_parts(page: Page, runs: Sequence[RunFiles]) -> None:
    figure = parts_figure(runs)
    if figure is not None:
        kinds = [(light(kind), label, "") for kind, (label, _) in PARTS.items()]
        about = "What the compute lane does or waits for. Lookup and exchange count only where they are not hidden."
        plot = page.plot("parts", figure, "parts of a step")
        page.sections.append(_section("Where the time of a step goes", about, legend(kinds), plot))


def _add_pool_and_bytes(page: Page, runs: Sequence[RunFiles]) -> None:
    sections = []
    sizes = bytes_figure(runs)
    rates = {number: (run.name, run.hit_rate) for number, run in enumerate(runs) if run.hit_rate.values}
    if rates:
        figure = curves_figure(rates, ".0%")
        figure["layout"]["yaxis"]["range"] = [-0.02, 1.02]
        if sizes is not None:  # they stand side by side
            figure["layout"]["height"] = sizes["layout"]["height"]
        about = "Share of a batch's rows that were resident already, on rank 0."
        plot = page.plot("hit-rate", figure, "hit rate by step")
        sections.append(_section("Hit rate of the row pool", about, _run_legend(runs), plot))
    if sizes is not None:
        about = "Means over ranks, per rank and step."
        plot = page.plot("bytes", sizes, "bytes of a step")
        sections.append(_section("Bytes moved", about, _run_legend(runs), plot))
    if sections:
        page.sections.append(f'<div class="pair">{"".join(sections)}</div>')


def _add_curves(page: Page, runs: Sequence[RunFiles]) -> None:
    """Adds a plot for the loss, and one for each metric of the evaluations."""
    plots = []
    losses = {number: (run.name, run.loss) for number, run in enumerate(runs) if run.loss.values}
    if losses:
        plots.append(("training loss", page.plot("loss", curves_figure(losses, ".4~g"), "loss by step")))
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    for name in names:
        if name in NOT_METRICS or name.endswith(CEILING):
            continue
        curves = {
            number: (run.name, run.metrics[name])
            for number, run in enumerate(runs)
            if name in run.metrics and run.metrics[name].values
        }
        if curves:
            figure = curves_figure(curves, ".4~g", has_marks=True)
            ceilings = {run.metrics[f"{name}{CEILING}"].values[-1] for run in runs if f"{name}{CEILING}" in run.metrics}
            for value in sorted(ceilings):
                ceiling(figure, value, light("muted"))
            title = "evaluated loss" if name == "loss" else metric_names([name]).get(name, name)
            plots.append((title, page.plot(f"metric-{len(plots)}", figure, f"{name} by step")))
    if plots:
        blocks = "".join(f"<div><h3>{escape(title)}</h3>{plot}</div>" for title, plot in plots)
        about = "The loss of each step, and the metrics of the evaluations while training."
        if len(runs) > 1:
            about += " A dashed curve lies on another one: the two are equal."
        shown = f'<div class="multiples">{blocks}</div>'
        page.sections.append(_section("Loss and metrics", about, _run_legend(runs), shown))
