"""Prints the summary of a run, and the result of an evaluation."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from nestpipe.cli.monitor_show import show_slow
from nestpipe.recipe.run import Summary
from nestpipe.recipe.summary import TIME_FIELDS
from nestpipe.report.metric_names import metric_names

MEANINGS = {
    "dense_ms": "dense compute",
    "row_update_ms": "row optimizer",
    "exposed_lookup_ms": "route, retrieve, write-back",
    "exposed_exchange_ms": "row exchange, gradient return",
    "exposed_input_ms": "reading and dedup",
    "exposed_reduce_ms": "dense all-reduce",
    "other_ms": "other named work",
    "unattributed_ms": "not accounted for",
}
SKIPPED = {"files": "files that cannot be opened", "groups": "row groups that cannot be read", "rows": "rows"}
SPLITS = {"test": "", "validation": ", not the test: nestpipe evaluate FOLDER --set evaluate.split=test"}
"""Splits of prepared data, and how to evaluate on the test."""
NUM_LISTED = 8
"""Tables that are listed with their memory, the largest first. The summary's file has all of them."""


def show_summary(summary: Summary, console: Console) -> None:
    steps = f"{summary['steps']}{', stopped early' if summary['is_stopped_early'] else ''}"
    rows = [("steps", steps), ("loss of the last step", _number(summary["final_loss"]))]
    console.print(_table(f"{summary['schedule']}, {summary['ranks']} ranks", ("", ""), rows))
    if summary["metrics"]:
        _show_metrics(summary, console)
    _show_time(summary, console)
    console.print(summary["splitting"]["text"], highlight=False, soft_wrap=True, markup=False)
    _show_memory(summary, console)
    _show_skipped(summary["skipped"], console)
    console.print(f"digest {summary['digest']}", highlight=False, soft_wrap=True)


def show_evaluation(result: Summary, console: Console) -> None:
    console.print(f"{result['checkpoint']}, {result['steps']} steps", highlight=False, soft_wrap=True)
    _show_metrics(result, console)


def _show_metrics(result: Summary, console: Console) -> None:
    """Prints the metrics, with a column for each reference to compare with."""
    metrics, published = result["metrics"], result["published"]
    if result["split"] is not None:
        line = f"evaluated on the {result['split']}{SPLITS[result['split']]}"
        console.print(line, highlight=False, soft_wrap=True)
    names = metric_names(metrics)
    columns = {f"among {metrics['num_items']:,} items" if "num_items" in metrics else "model": metrics}
    if "auc_ceiling" in metrics:
        columns["true probability"] = {f: metrics[f"{f}_ceiling"] for f in names if f"{f}_ceiling" in metrics}
    if "auc" in metrics:
        columns["constant prediction"] = {"auc": 0.5, "normalised_entropy": 1.0}
    if published:
        columns["published, on the published data"] = published
    title = f"{metrics['num_samples']:,} held-out samples"
    rows = [(name, *(_number(c[f]) if f in c else "" for c in columns.values())) for f, name in names.items()]
    console.print(_table(None, (title, *columns), rows))


def _show_skipped(skipped: dict[str, dict[str, Any]], console: Console) -> None:
    for purpose, parts in skipped.items():
        counts = ", ".join(f"{parts[f'num_{kind}']:,} {name}" for kind, name in SKIPPED.items())
        console.print(f"left out of the data for {purpose}: {counts}", highlight=False, soft_wrap=True)
        for example in parts["examples"]:
            console.print(f"  {example}", highlight=False, soft_wrap=True, markup=False)


def _show_time(summary: Summary, console: Console) -> None:
    step = summary["step_ms"]
    rows = []
    for field in TIME_FIELDS:
        low, high = summary["spread"][field]
        share = summary[field] / step if step > 0 else 0.0
        rows.append((MEANINGS[field], f"{summary[field]:.2f}", f"{low:.2f} .. {high:.2f}", f"{share:.1%}"))
    rows.append(("step (slowest rank)", f"{step:.2f}", "", f"{summary['samples_per_second']:,.0f} samples/s"))
    console.print(_table(None, ("step time", "ms", "min .. max over ranks", "share"), rows))
    show_slow(summary["slow"], console)


def _show_memory(summary: Summary, console: Console) -> None:
    largest = sorted(summary["tables"], key=lambda t: -t["num_rows"])
    listed = largest[: NUM_LISTED if len(largest) > NUM_LISTED + 1 else None]
    rows = [_memory_row(t["name"], t) for t in listed]
    if smaller := largest[len(listed) :]:
        rows.append(_memory_row(f"{len(smaller)} smaller tables", _sums(smaller)))
    rows.append(_memory_row("all tables", _sums(largest)))
    console.print(_table(None, ("table", "rows", "row MB", "state MB", "overhead MB"), rows))
    console.print(f"peak memory of a rank {summary['peak_rss_bytes'] / 1e6:,.0f} MB", highlight=False)
    if summary["resident_bytes"] > 0:
        text = f"row pool of a rank {summary['resident_bytes'] / 1e6:,.2f} MB, {summary['resident_rows']:,.0f} rows"
        console.print(f"{text}; {summary['hit_rate']:.1%} of a batch's rows were resident already", highlight=False)
    if summary["device_memory"] is not None:
        _show_device_memory(summary["device_memory"], console)


def _show_device_memory(memory: dict[str, int | None], console: Console) -> None:
    sizes = {name.removesuffix("_bytes"): num_bytes / 1e6 for name, num_bytes in memory.items() if num_bytes}
    named = {
        "formula": "device memory of embeddings, by the formula",
        "peak": "device memory of embeddings, at most",
        "host_staging": "pinned host memory",
        "whole_device_peak": "device memory in total, at most",
    }
    terms = [(f"  {name}", f"{size:,.2f}") for name, size in sizes.items() if name not in named]
    rows = {name: (text, f"{sizes[name]:,.2f}") for name, text in named.items() if name in sizes}
    first = [rows.pop("formula")] if "formula" in rows else []
    console.print(_table(None, ("rank that needs most", "MB"), [*first, *terms, *rows.values()]))


def _sums(tables: Sequence[dict[str, int]]) -> dict[str, int]:
    return {
        field: sum(t[field] for t in tables) for field in ("num_rows", "row_bytes", "state_bytes", "overhead_bytes")
    }


def _memory_row(name: str, table: dict[str, int]) -> tuple[str, ...]:
    sizes = (f"{table[field] / 1e6:,.2f}" for field in ("row_bytes", "state_bytes", "overhead_bytes"))
    return (name, f"{table['num_rows']:,}", *sizes)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _table(title: str | None, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table
