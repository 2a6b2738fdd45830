"""`nestpipe simulate`: what training would take on a cluster that is described, or on the machine of a trace."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nestpipe import __version__
from nestpipe.cli.simulate_show import keys_table, predictions_table, records_table
from nestpipe.cli.this_rank import check_writable, failed
from nestpipe.prediction.ways import CROSSING, all_ways
from nestpipe.prediction.work import Way
from nestpipe.recipe.value import ConfigError
from nestpipe.simulator.cluster import Cluster
from nestpipe.simulator.cluster_text import load_cluster
from nestpipe.simulator.fit import Fitted, fit, fit_error, predictions
from nestpipe.simulator.plot import draw_scaling
from nestpipe.simulator.simulate import Record
from nestpipe.simulator.simulate import simulate as records_of
from nestpipe.simulator.trace_out import write_simulated_trace
from nestpipe.simulator.trace_times import read_trace_times

LEAST_WIDTH = 120
"""Columns of the widest table."""


def simulate(
    cluster: Annotated[
        Path | None, typer.Argument(metavar="[CLUSTER.toml]", help="A cluster; without one, the default.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option("--workers", metavar="128,256,...", help="Numbers of workers, instead of run.workers.")
    ] = None,
    path: Annotated[Path | None, typer.Option("--json", help="File for the results.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="File for a plot by number of workers, as SVG.")] = None,
    from_trace: Annotated[
        list[Path] | None,
        typer.Option(
            "--from-trace",
            metavar="TRACE",
            help="Fit costs to a file of `nestpipe train --trace`, and predict the other schedules on that machine. "
            "Give it again for a run with another number of micro-batches.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="File for a trace of the simulated timeline, with the most workers."),
    ] = None,
    way: Annotated[str, typer.Option("--way", help="What --trace shows: a name of the column `way`.")] = "nested",
    list_keys: Annotated[
        bool, typer.Option("--list-keys", help="Print every key of a cluster file, and stop.")
    ] = False,
) -> None:
    """Simulate training on a cluster: plays the operations of each schedule with costs from a cluster file.

    With --from-trace, costs come from real runs instead.
    """
    console = Console(width=max(LEAST_WIDTH, Console().width))
    if list_keys:
        console.print(keys_table())
        return
    try:
        for option, file in (("--json", path), ("--plot", plot), ("--trace", trace)):
            check_writable(option, file)
        described = load_cluster(cluster)
        if from_trace:
            if any((workers, plot, trace)):
                raise ConfigError(
                    "--from-trace predicts the machine of the trace; leave out --workers, --plot, --trace"
                )
            result = _predict(from_trace, described if cluster is not None else None, console)
        else:
            result = _simulate(described, _numbers(workers, described), plot, trace, way, console)
    except (ConfigError, OSError, ValueError) as error:
        raise failed(error, 2) from None
    if path is not None:
        path.write_text(json.dumps({"command": "simulate", "version": __version__, "records": result}, indent=2) + "\n")


def _numbers(text: str | None, cluster: Cluster) -> Sequence[int]:
    if text is None:
        return cluster.run.workers
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--workers is {text!r}, must be whole numbers with commas between them, as in 128,1536")
    return numbers


def _simulate(
    cluster: Cluster, workers: Sequence[int], plot: Path | None, trace: Path | None, way: str, console: Console
) -> list[Record]:
    ways = {one.name: one for one in all_ways(cluster.two_d.num_groups)}
    if way not in ways:
        raise ConfigError(f"--way is {way!r}, must be one of {', '.join(ways)}")
    records = list(records_of(cluster, workers))
    for num_workers in sorted(set(workers)):
        console.print(records_table([record for record in records if record["workers"] == num_workers]))
    if plot is not None:
        plot.write_text(draw_scaling(records))
    if trace is not None:
        write_simulated_trace(cluster, max(workers), ways[way], trace)
    return records


def _predict(traces: Sequence[Path], cluster: Cluster | None, console: Console) -> list[dict[str, Any]]:
    """cluster: says how many micro-batches and hits to assume; None if no file was given."""
    fits: list[Fitted] = [fit(read_trace_times(trace)) for trace in traces]
    errors = [fit_error(fitted) for fitted in fits]
    for fitted, error in zip(fits, errors, strict=True):
        console.print(
            f"{fitted.name}: {fitted.way.name}, micro-batches {fitted.num_micro_batches}, ranks {fitted.num_ranks}, "
            f"{fitted.step_ms:,.1f} ms a step; fit error {error:+.1%}",
            highlight=False,
        )
    num = max(fitted.num_micro_batches for fitted in fits)
    described = cluster or Cluster()
    if cluster is not None or num == 1:
        num = described.batch.num_micro_batches
    predicted = predictions(fits, num, 0.0 if cluster is None else cluster.pool.hit_rate, described.overlap)
    console.print(predictions_table(predicted, fits))
    if not all(fitted.way.cross_batch for fitted in fits):
        whose = "of the default cluster" if cluster is None else "of the cluster file"
        console.print(f"{CROSSING.name}: batch.key_overlap = {described.overlap.keys:g}, {whose}", highlight=False)
    if all(fitted.num_micro_batches != num for fitted in fits):
        console.print(f"no trace has {num} micro-batches: taken as equal parts, with no cost of splitting")
    return [
        *(
            {"trace": fitted.name, **_named(fitted.way), "step_ms": fitted.step_ms, "fit_error": error}
            for fitted, error in zip(fits, errors, strict=True)
        ),
        *(
            {**_named(way), "num_micro_batches": number, "predicted_step_ms": result.step_ms, **result.parts}
            for (way, number), result in predicted.items()
        ),
    ]


def _named(way: Way) -> dict[str, str | bool]:
    return {"way": way.name, "schedule": way.schedule, "cross_batch": way.cross_batch}
