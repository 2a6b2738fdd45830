"""`nestpipe bench NAME`: runs a benchmark, writes its records, checks them against the targets."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nestpipe.bench import attention as attention_bench
from nestpipe.bench import learning as learning_bench
from nestpipe.bench import overlap as overlap_bench
from nestpipe.bench import plain as plain_bench
from nestpipe.bench import scale as scale_bench
from nestpipe.bench import store as store_bench
from nestpipe.bench.cluster import run as cluster_bench
from nestpipe.bench.consistency import figures
from nestpipe.bench.consistency import run as consistency_bench
from nestpipe.bench.h200 import run as h200_bench
from nestpipe.bench.harness.hosts import check_possible
from nestpipe.bench.harness.report import Record, load_records, print_records, run_bench
from nestpipe.bench.harness.requirements import RequirementError
from nestpipe.bench.harness.targets import find_misses, load_targets
from nestpipe.bench.network import run as network_bench
from nestpipe.bench.schedules import run as schedules_bench

app = typer.Typer(help="Measure, and compare with the targets in benchmarks/targets.toml.", no_args_is_help=True)

Json = Annotated[Path, typer.Option("--json", help="File for the records and the environment they were measured in.")]
Quick = Annotated[bool, typer.Option("--quick", help="A run of seconds that shows it works; its figures mean nothing.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 and name each target that is missed.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="File for a plot of the records, as SVG.")]
Draw = Callable[[list[Record]], None]


def _run(
    name: str,
    records: Callable[[], Iterator[Record]],
    path: Path,
    quick: bool,
    check: bool,
    draw: Draw | None = None,
) -> None:
    if quick and check:
        raise typer.BadParameter("--quick has no thresholds; leave out one of --quick and --check")
    _check_writable(path, "--json")
    try:
        targets = load_targets(name) if check else []
        if check and not targets:
            raise typer.BadParameter(f"there are no targets for {name} to check")
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console()
    try:
        result = run_bench(name, records, path, console, quick=quick)
    except RequirementError as error:
        raise typer.BadParameter(str(error)) from None
    print_records(result, console)
    if draw is not None:
        draw(result.records)
    misses = find_misses(targets, result.records)
    for miss in misses:
        console.print(f"[red]missed[/red] {miss}", highlight=False, soft_wrap=True)
    if check and not misses:
        console.print(f"all {len(targets)} targets of {name} are met", highlight=False)
    if misses:
        raise typer.Exit(1)


def _check_writable(path: Path, option: str) -> None:
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} of {option} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} of {option} cannot be written")


@app.command()
def store(path: Json, quick: Quick = False, check: Check = False) -> None:
    """The host store against torch: gather, scatter, unique; memory per row; growth."""
    _run("store", lambda: store_bench.records(quick), path, quick, check)


@app.command()
def plain(path: Json, quick: Quick = False, check: Check = False) -> None:
    """The serial step on one rank against a plain PyTorch loop with sparse embeddings."""
    _run("plain", lambda: plain_bench.records(quick), path, quick, check)


@app.command()
def schedules(path: Json, quick: Quick = False, check: Check = False) -> None:
    """What each schedule hides against serial, on one rank; host traffic by overlap; what it costs small batches."""
    _run("schedules", lambda: schedules_bench.records(quick), path, quick, check)


@app.command()
def cluster(path: Json, quick: Quick = False, check: Check = False) -> None:
    """What clustering does to the keys of micro-batches, and its time: against the given order and bisection."""
    _run("cluster", lambda: cluster_bench.records(quick), path, quick, check)


@app.command()
def attention(path: Json, quick: Quick = False, check: Check = False) -> None:
    """The blocked form of attention against the plain one: memory for each token by length, and time."""
    _run("attention", lambda: attention_bench.records(quick), path, quick, check)


@app.command()
def learning(path: Json, quick: Quick = False, check: Check = False) -> None:
    """HSTU and FuXi on synthetic histories: ranks of held-out targets against counting and against the oracle."""
    _run("learning", lambda: learning_bench.records(quick), path, quick, check)


@app.command()
def reader(path: Json, quick: Quick = False, check: Check = False) -> None:
    """The loader on one core against what training consumes: clicks for the demo, histories for an HSTU recipe."""
    from nestpipe.bench.reader import run as reader_bench  # pyarrow is imported where it is used

    _run("reader", lambda: reader_bench.records(quick), path, quick, check)


@app.command()
def overlap(path: Json, quick: Quick = False, check: Check = False) -> None:
    """What a frozen window leaves exposed of exchanges whose time is known: 2 ranks on this machine."""
    _run("overlap", lambda: overlap_bench.records(quick), path, quick, check)


@app.command()
def prepare(
    path: Json,
    num_rows: Annotated[int, typer.Option("--rows", min=1000, help="Lines of the generated logs.")] = 20_000_000,
    quick: Quick = False,
    check: Check = False,
) -> None:
    """`nestpipe data prepare` on logs like KuaiRand's: speed against merely reading them, memory, killed runs."""
    from nestpipe.bench import prepare as prepare_bench  # pyarrow is imported where it is used

    _run("prepare", lambda: prepare_bench.records(num_rows, quick), path, quick, check)


@app.command()
def scale(path: Json, quick: Quick = False, check: Check = False) -> None:
    """The host's work for one rank's step in worlds of up to 1,536 ranks, with up to 200 tables."""
    _run("scale", lambda: scale_bench.records(quick), path, quick, check)


@app.command()
def network(
    path: Json,
    hosts: Annotated[int, typer.Option("--hosts", help="Network namespaces that stand for hosts, a rank each.")] = 2,
    rate: Annotated[str, typer.Option("--rate", help="Of the link between them, each way, as tc writes it.")] = "1gbit",
    quick: Quick = False,
    check: Check = False,
) -> None:
    """What each schedule hides of the exchange between two hosts on a slow link; needs root."""
    try:
        check_possible(hosts, rate)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _run("network", lambda: network_bench.records(rate, quick), path, quick, check)


@app.command()
def consistency(path: Json, plot: Plot = None, quick: Quick = False, check: Check = False) -> None:
    """HSTU on 3 ranks: every schedule ends with serial's digest and metrics; how far stale rows are from them."""
    draw = _drawing(plot, path) if plot is not None else None
    _run("consistency", lambda: consistency_bench.records(quick), path, quick, check, draw)


@app.command()
def redraw(
    path: Annotated[Path, typer.Argument(help="What `nestpipe bench consistency --json` wrote.", metavar="RESULT")],
    plot: Plot = None,
) -> None:
    """Nothing is measured: prints the table of a saved result of consistency in Markdown, and plots it if asked."""
    draw = _drawing(plot, path) if plot is not None else None
    try:
        records = load_records(path, "consistency")
        typer.echo(figures.table(records))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if draw is not None:
        draw(records)


def _drawing(plot: Path, result: Path) -> Draw:
    """Refuses what cannot be written at once, before anything is measured."""
    _check_writable(plot, "--plot")
    if plot.resolve() == result.resolve():
        raise typer.BadParameter(f"{plot} of --plot is the file of the records; give the plot one of its own")

    def draw(records: list[Record]) -> None:
        try:
            plot.write_text(figures.plot(records))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return draw


@app.command()
def h200(
    path: Json,
    part: Annotated[str, typer.Option("--part", help="one-rank, four-ranks or stages.")],
    quick: Quick = False,
    check: Check = False,
) -> None:
    """A large table in host memory, and an accelerator: whole steps, of one rank and of four; single stages."""
    if part not in h200_bench.PARTS:
        raise typer.BadParameter(f"--part is {part!r}, must be one of {', '.join(h200_bench.PARTS)}")
    try:
        records = h200_bench.records(part, quick)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _run(f"h200-{part}", lambda: records, path, quick, check)
