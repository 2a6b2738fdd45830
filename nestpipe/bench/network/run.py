"""`bench network`: how much of the exchange each schedule hides if ranks are on hosts with a slow link between them.

This module makes the hosts and starts the ranks. The ranks run network/rank.py, and print their records as JSON.
"""

import json
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.hosts import check_possible, linked_hosts, ranks_on
from nestpipe.bench.harness.report import Record

BURST_BYTES = 32768
"""Bytes that a host may send at once, faster than its rate. The smallest exchange must be at least 8 times as large."""
PARTS = ("schedules", "overlap")
"""The schedules next to each other, and exchange across batches."""
GRACE_SECONDS = 5.0
"""Time that the other ranks have to end, after one has failed. They learn of the failure and report it themselves."""


def records(
    quick: bool,
    *,
    hosts: Annotated[int, typer.Option("--hosts", help="Network namespaces that emulate hosts, with a rank each.")] = 2,
    rate: Annotated[
        str, typer.Option("--rate", help="Rate of the link between them, each way, in the notation of tc.")
    ] = "1gbit",
    part: Annotated[str | None, typer.Option("--part", help="Only this part: schedules or overlap.")] = None,
    traces: Annotated[
        Path | None,
        typer.Option("--traces", help="Folder for traces of serial and nested, which `nestpipe report` draws."),
    ] = None,
) -> Iterator[Record]:
    check_possible(hosts, rate)
    if traces is not None and not traces.is_dir():
        raise ValueError(f"the folder {traces} of --traces does not exist")
    if part not in (None, *PARTS):
        raise ValueError(f"part is {part!r}; there are {' and '.join(PARTS)}")
    return _records(quick, rate, [part] if part is not None else PARTS, traces)


BENCHMARK = Benchmark(
    "network", records, "How much each schedule hides of the exchange between two hosts on a slow link. Needs root."
)


def _records(quick: bool, rate: str, parts: Sequence[str], traces: Path | None) -> Iterator[Record]:
    arguments = [*(["--quick"] if quick else []), f"--rate={rate}", f"--burst-bytes={BURST_BYTES}", "--parts", *parts]
    arguments += [] if traces is None else [f"--traces={traces.resolve()}"]
    with (
        linked_hosts(rate, BURST_BYTES) as hosts,
        ranks_on(hosts, "nestpipe.bench.network.rank", arguments) as ranks,
    ):
        for line in lines_of(ranks):
            yield json.loads(line)


def lines_of(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[bytes]:
    """Yields the lines that rank 0 prints, until all ranks have ended. Raises RuntimeError if one of them failed."""
    output = ranks[0].stdout
    assert output is not None
    is_open, deadline = True, None
    while is_open or any(rank.poll() is None for rank in ranks):
        if is_open and select.select([output], [], [], 0.1)[0]:
            line = output.readline()
            is_open = line != b""
            if is_open:
                yield line
        elif not is_open:
            time.sleep(0.1)
        if deadline is None and any(rank.poll() not in (None, 0) for rank in ranks):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            break
    failed = {number: rank.poll() for number, rank in enumerate(ranks) if rank.poll() != 0}
    if failed:
        codes = ", ".join(f"rank {number}: {'no end' if code is None else code}" for number, code in failed.items())
        raise RuntimeError(f"ranks of the benchmark failed (exit codes: {codes}); their messages stand above")
