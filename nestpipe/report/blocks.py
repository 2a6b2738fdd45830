"""Parts of the page that are text and tables. Everything that comes from a file is escaped."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nestpipe.report.colours import LIGHT_AND_DARK, NUM_RUN_COLOURS
from nestpipe.report.metric_names import metric_names
from nestpipe.report.run_files import RunFiles, as_number

LEFT_OUT = ("config", "environment", "validations", "digest")
"""Fields of the summary that the table of numbers leaves out, because the page shows them elsewhere or in full."""


def cards(runs: Sequence[RunFiles]) -> str:
    """Returns a card for each run with its main numbers."""
    blocks = []
    for number, run in enumerate(runs):
        colour = f"var(--run{number % NUM_RUN_COLOURS})"
        facts = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in _facts(run))
        blocks.append(
            f'<article class="card" style="--run: {colour}"><h2>{escape(run.name)}</h2>'
            f'<p class="kind">{escape(_kind(run))}</p>{_speed(run, runs)}'
            f"{f'<dl>{facts}</dl>' if facts else ''}</article>"
        )
    return f'<section class="cards">{"".join(blocks)}</section>'


def _kind(run: RunFiles) -> str:
    summary = run.summary
    if not summary:
        return "trace only" if run.trace is not None else "no summary"
    ranks, parts = summary.get("ranks"), summary.get("num_micro_batches")
    return f"{summary.get('schedule')}, {_count(ranks, 'rank')}, {_count(parts, 'micro-batch', 'micro-batches')}"


def _count(number: object, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def _speed(run: RunFiles, runs: Sequence[RunFiles]) -> str:
    """Returns the time of a step, and how it compares with the first run's."""
    step_ms, first_ms = run.number("step_ms"), runs[0].number("step_ms")
    if not step_ms:
        return ""
    compared = ""
    if len(runs) > 1 and first_ms:
        times = f"{first_ms / step_ms:.2f} times as fast as {escape(runs[0].name)}"
        compared = f'<p class="kind">{"the others are compared with this run" if run is runs[0] else times}</p>'
    return f'<p class="big">{step_ms:,.1f} <small>ms a step</small></p>{compared}'


def _facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Yields names and texts of the numbers that a run has."""
    forms = {
        "steps": ("steps", "{:,.0f}"),
        "samples_per_second": ("samples per second", "{:,.0f}"),
        "hit_rate": ("hit rate of the row pool", "{:.1%}"),
        "model_flop_utilisation": ("model FLOP utilisation", "{:.1%}"),
        "final_loss": ("last loss", "{:.4f}"),
    }
    for name, (label, form) in forms.items():
        value = run.number(name)
        if value is not None:
            yield label, form.format(value)
    metrics = run.summary.get("metrics")
    if isinstance(metrics, Mapping):
        for field, name in metric_names(metrics).items():
            value = as_number(metrics[field])
            yield from [(f"{escape(name)}, evaluated", f"{value:.4f}")] if value is not None else []
    peak = run.number("peak_rss_bytes")
    if peak is not None:
        yield "peak memory of a rank", f"{peak / 1e6:,.0f} MB"


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """Returns the meaning of colours: colour, name, and an explanation or nothing."""
    names = {shades[0]: f"var(--{name})" for name, shades in LIGHT_AND_DARK.items()}
    items = (
        f'<li><i style="--key: {names[colour]}"></i><span><b>{escape(name)}</b> {escape(meaning)}</span></li>'
        for colour, name, meaning in entries
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def table(runs: Sequence[RunFiles], rows: Mapping[str, Sequence[str]], is_numeric: bool = False) -> str:
    """Returns a table with a column for each run; with a single one for all if no row differs."""
    if not rows:
        return ""
    heads = [run.name for run in runs]
    if len(runs) > 1 and all(len(set(values)) == 1 for values in rows.values()):
        heads, rows = ["all runs"], {name: values[:1] for name, values in rows.items()}
    kind = ' class="number"' if is_numeric else ""
    head = "".join(f"<th scope='col'{kind}>{escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr><th scope='row'>{_breakable(name)}</th>{''.join(f'<td{kind}>{escape(v)}</td>' for v in values)}</tr>"
        for name, values in rows.items()
    )
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _breakable(name: str) -> str:
    """Returns the name of a field, which may be broken between its words."""
    return escape(name).replace("_", "_<wbr>").replace(".", ".<wbr>")


def environment(runs: Sequence[RunFiles]) -> str:
    """Returns the machine and the versions of each run that has recorded them."""
    known = [run for run in runs if isinstance(run.summary.get("environment"), Mapping)]
    names = dict.fromkeys(name for run in known for name in run.summary["environment"])
    values = {name: [run.summary["environment"].get(name) for run in known] for name in names}
    rows = {name: [_text(value) for value in row] for name, row in values.items() if any(v is not None for v in row)}
    for name in ("backend", "digest"):
        found = [run.summary.get(name) for run in known]
        if any(found):
            rows[name] = [_text(value) for value in found]
    if not rows:
        return ""
    return f"<section><h2>Environment</h2>{table(known, rows)}</section>"


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1e5 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the entries of nested mappings, named by their path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def numbers(runs: Sequence[RunFiles]) -> str:
    """Returns all numbers of the summaries, folded up."""
    known = [run for run in runs if run.summary]
    flat = [
        {name: value for name, value in _flat(run.summary) if name.partition(".")[0] not in LEFT_OUT} for run in known
    ]
    names = dict.fromkeys(name for values in flat for name, value in values.items() if as_number(value) is not None)
    rows = {name: [_text(values.get(name)) for values in flat] for name in names}
    if not rows:
        return ""
    return (
        f"<section><details><summary>All numbers of the summary</summary>{table(known, rows, True)}</details></section>"
    )


def recipes(runs: Sequence[RunFiles]) -> str:
    """Returns the keys of the recipes that differ, and each recipe, folded up."""
    known = [run for run in runs if isinstance(run.summary.get("config"), str)]
    if not known:
        return ""
    blocks = "".join(
        f"<details><summary>Recipe of {escape(run.name)}</summary>"
        f'<div class="scroll"><pre>{escape(run.summary["config"])}</pre></div></details>'
        for run in known
    )
    rows = _differing_keys([run.summary["config"] for run in known])
    shown = f"<p class='about'>Keys that differ between the runs.</p>{table(known, rows)}" if rows else ""
    return f"<section><h2>Recipe</h2>{shown}{blocks}</section>"


def _differing_keys(texts: Sequence[str]) -> dict[str, list[str]]:
    try:
        flat = [dict(_flat(tomllib.loads(text))) for text in texts]
    except tomllib.TOMLDecodeError:
        return {}  # the recipes themselves are shown anyway
    names = dict.fromkeys(name for values in flat for name in values)
    rows = {name: [_text(values.get(name)) for values in flat] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}
