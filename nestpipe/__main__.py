"""`python -m nestpipe`: the command line, without an installed entry point."""

from nestpipe.cli.main import app

app(prog_name="nestpipe")
