"""`nestpipe`: the commands and their options."""

from typing import Annotated

import typer

from nestpipe import __version__
from nestpipe.cli.bench import app as bench_app
from nestpipe.cli.checkpoint import app as checkpoint_app
from nestpipe.cli.data import app as data_app
from nestpipe.cli.evaluate import evaluate
from nestpipe.cli.list import list_entries
from nestpipe.cli.monitor import monitor
from nestpipe.cli.plan import plan
from nestpipe.cli.report import report
from nestpipe.cli.simulate import simulate
from nestpipe.cli.train import train

app = typer.Typer(
    help="Train recommendation models whose embedding tables are larger than accelerator memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(evaluate)
app.command(name="list")(list_entries)
app.command()(report)
app.command()(monitor)
app.command()(simulate)
app.command()(plan)
app.add_typer(bench_app, name="bench")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nestpipe {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass
