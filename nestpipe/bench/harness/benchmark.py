"""A benchmark declares itself in its own module; the command line finds it there."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import nestpipe.bench
from nestpipe.bench.harness.report import Record


@dataclass(frozen=True)
class Benchmark:
    """A command of `nestpipe bench`."""

    name: str
    records: Callable[..., Iterator[Record]]
    """Called as records(quick, **options). Its keyword-only parameters, annotated with typer.Option, are the command's
    own options. Raises ValueError when called, not while iterating, if it cannot run on this machine."""
    help: str
    plot: Callable[[Sequence[Record]], str] | None = None
    """Draws the records as SVG for --plot; without it the command has no such option."""
    result: str = ""
    """Name in result files and targets, if not `name`. May contain options in braces, as in "h200-{part}"."""

    def result_name(self, **options: object) -> str:
        return (self.result or self.name).format(**options)


def find_benchmarks() -> Iterator[Benchmark]:
    """Yields BENCHMARK of every module in nestpipe/bench, by name. For a folder, that of the module `run` in it."""
    for module in pkgutil.iter_modules(nestpipe.bench.__path__, "nestpipe.bench."):
        if module.name != "nestpipe.bench.harness":
            name = f"{module.name}.run" if module.ispkg else module.name
            declared = getattr(importlib.import_module(name), "BENCHMARK", None)
            if declared is None:
                raise AttributeError(
                    f"{name} declares no BENCHMARK; put what benchmarks share into nestpipe.bench.harness"
                )
            yield declared
