"""The command `nestpipe bench prepare`."""

from collections.abc import Iterator
from typing import Annotated

import typer

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.report import Record


def records(
    quick: bool,
    *,
    num_rows: Annotated[int, typer.Option("--rows", min=1000, help="Rows of the generated logs.")] = 20_000_000,
) -> Iterator[Record]:
    from nestpipe.bench.prepare.measure import measure  # needs pyarrow, which `nestpipe --help` does not load

    return measure(num_rows, quick)


BENCHMARK = Benchmark(
    "prepare",
    records,
    "`nestpipe data prepare` on logs like KuaiRand's: speed relative to reading the files, memory, and killed runs.",
)
