"""`nestpipe bench NAME`: runs a benchmark, writes its records, checks them against the targets."""

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nestpipe.bench.consistency import figures
from nestpipe.bench.harness.benchmark import Benchmark, find_benchmarks
from nestpipe.bench.harness.documents import FigureError, refreshed
from nestpipe.bench.harness.report import Record, load_records, print_records, run_bench
from nestpipe.bench.harness.requirements import RequirementError, source_file
from nestpipe.bench.harness.targets import Target, find_misses, load_targets
from nestpipe.bench.paper import page

Json = Annotated[Path, typer.Option("--json", help="File for the records and the environment they were measured in.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Run for seconds to show that the benchmark works; its figures mean nothing.")
]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 and name every missed target.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="File for a plot of the records, as SVG.")]


def make_app(benchmarks: Iterable[Benchmark]) -> typer.Typer:
    """Returns a command for each benchmark, and those that measure nothing."""
    app = typer.Typer(help="Measure, and compare with the targets in benchmarks/targets.toml.", no_args_is_help=True)
    for benchmark in benchmarks:
        app.command(benchmark.name, help=benchmark.help)(_command(benchmark))
    app.command()(redraw)
    app.command()(report)
    return app


def _command(benchmark: Benchmark) -> Callable[..., None]:
    """Returns a function with the signature that typer reads: the options of all benchmarks and those of this one."""

    def command(path: Path, quick: bool, check: bool, plot: Path | None = None, **options: Any) -> None:
        _run(benchmark, path, quick, check, plot, options)

    own = inspect.signature(benchmark.records, eval_str=True).parameters.values()
    parameters = [
        _keyword("path", Json),
        *([_keyword("plot", Plot, None)] if benchmark.plot is not None else []),
        *(parameter for parameter in own if parameter.kind is Parameter.KEYWORD_ONLY),
        _keyword("quick", Quick, False),
        _keyword("check", Check, False),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _keyword(name: str, annotation: Any, default: object = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _run(
    benchmark: Benchmark, path: Path, quick: bool, check: bool, plot: Path | None, options: dict[str, Any]
) -> None:
    if plot is not None:
        _check_plot(plot, path)
    try:
        records = benchmark.records(quick, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    name = benchmark.result_name(**options)
    if quick and check:
        raise typer.BadParameter("--quick has no thresholds; leave out one of --quick and --check")
    _check_writable(path, "--json")
    targets = _targets(name) if check else []
    console = Console()
    try:
        result = run_bench(name, records, path, console, quick=quick)
    except RequirementError as error:
        raise typer.BadParameter(str(error)) from None
    print_records(result, console)
    if plot is not None:
        assert benchmark.plot is not None
        _draw(benchmark.plot, result.records, plot)
    misses = find_misses(targets, result.records)
    for miss in misses:
        console.print(f"[red]missed[/red] {miss}", highlight=False, soft_wrap=True)
    if check and not misses:
        console.print(f"all {len(targets)} targets of {name} are met", highlight=False)
    if misses:
        raise typer.Exit(1)


def _targets(name: str) -> list[Target]:
    try:
        targets = load_targets(name)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from None
    if not targets:
        raise typer.BadParameter(f"there are no targets for {name} to check")
    return targets


def redraw(
    path: Annotated[Path, typer.Argument(help="Result of `nestpipe bench consistency --json`.", metavar="RESULT")],
    plot: Plot = None,
) -> None:
    """Print the table of a saved result of consistency in Markdown, and plot it if asked. Measures nothing."""
    if plot is not None:
        _check_plot(plot, path)
    try:
        records = load_records(path, "consistency")
        typer.echo(figures.table(records))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if plot is not None:
        _draw(figures.plot, records, plot)


def report(
    documents: Annotated[
        list[Path] | None,
        typer.Argument(help="Markdown files; by default those of the source tree: README.md and docs.", metavar="FILE"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if a figure is not current.")
    ] = False,
) -> None:
    """Write the figures of documents anew from benchmarks/results, and the page of bench paper. Measures nothing."""
    try:
        results = source_file("benchmarks/results")
        files = documents or [source_file("README.md"), *sorted(source_file("docs").glob("*.md"))]
        texts = {file: (file.read_text(), refreshed(file.read_text(), results)) for file in files}
        texts |= {} if documents else _generated(source_file("docs"), results)
    except (OSError, RequirementError, FigureError) as error:
        raise typer.BadParameter(str(error)) from None
    changed = [file for file, (old, new) in texts.items() if old != new]
    for file in changed:
        if not check:
            file.write_text(texts[file][1])
        typer.echo(f"{file} {'has other figures than benchmarks/results' if check else 'is written'}")
    if check and changed:
        raise typer.Exit(1)


def _generated(folder: Path, results: Path) -> dict[Path, tuple[str, str]]:
    """Returns the text that each generated file has now, and the one that it should have."""
    made = {folder / name: text for name, text in page.files(results=results).items()}
    return {file: (file.read_text() if file.exists() else "", text) for file, text in made.items()}


def _check_plot(plot: Path, result: Path) -> None:
    _check_writable(plot, "--plot")
    if plot.resolve() == result.resolve():
        raise typer.BadParameter(f"{plot} of --plot is the file of the records; give the plot one of its own")


def _check_writable(path: Path, option: str) -> None:
    """Refuses a path before the measurement, not after it."""
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} of {option} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} of {option} cannot be written")


def _draw(draw: Callable[[Sequence[Record]], str], records: list[Record], path: Path) -> None:
    try:
        path.write_text(draw(records))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


app = make_app(find_benchmarks())
