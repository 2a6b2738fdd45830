"""The command `nestpipe bench peer`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.hosts import check_possible
from nestpipe.bench.harness.report import Record


def records(
    quick: bool,
    *,
    workload: Annotated[
        str | None, typer.Option("--workload", help="Only this one: pooled, sequences or criteo.")
    ] = None,
    environment: Annotated[
        Path | None,
        typer.Option("--env", help="Environment with TorchRec; by default one in the user's cache, made on first use."),
    ] = None,
    rate: Annotated[
        str,
        typer.Option("--rate", help="Rate of the link between two hosts, in the notation of tc; none to leave out."),
    ] = "1gbit",
) -> Iterator[Record]:
    from nestpipe.bench.peer.environment import default_folder, find_or_make
    from nestpipe.bench.peer.measure import Peer, measure
    from nestpipe.bench.peer.workload import WORKLOADS

    if workload is not None and workload not in WORKLOADS:
        raise ValueError(f"workload is {workload!r}; there are {', '.join(WORKLOADS)}")
    if rate != "none":
        check_possible(2, rate)
    python = find_or_make((environment or default_folder()).resolve(), lambda line: print(line, file=sys.stderr))
    peer = Peer(python, quick)
    return measure(peer, [workload] if workload else list(WORKLOADS), None if rate == "none" else rate)


BENCHMARK = Benchmark("peer", records, "Steps of two ranks against those of TorchRec, on the same work. Needs root.")
