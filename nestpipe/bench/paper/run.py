"""`bench paper`: the published tables, measured on emulated hosts of this machine, next to the published figures.

This module makes the hosts and starts the ranks. The ranks run paper/rank.py, and print their records as JSON.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.hosts import check_machine, linked_hosts, ranks_on
from nestpipe.bench.harness.report import Record
from nestpipe.bench.network.run import BURST_BYTES, lines_of
from nestpipe.bench.paper import page
from nestpipe.bench.paper.published import counterpart

RATE, SLOW_RATE = "1gbit", "300mbit"
"""Rates of the links with paced compute, and with real compute."""
RANKS, QUICK_RANKS = (1, 2, 4), (1, 2)


def records(
    quick: bool,
    *,
    report: Annotated[
        Path | None, typer.Option("--report", help="Folder for a page with the tables, paper.md, and its picture.")
    ] = None,
) -> Iterator[Record]:
    check_machine(RATE)
    if report is not None and not report.is_dir():
        raise ValueError(f"the folder {report} of --report does not exist")
    return _records(quick, report)


BENCHMARK = Benchmark(
    "paper", records, "The tables of the method's paper at a small scale, next to the published figures. Needs root."
)


def _records(quick: bool, report: Path | None) -> Iterator[Record]:
    made: list[Record] = []
    for record in _measured(quick):
        made.append(record)
        yield record
    if report is not None:
        page.write(report, made)


def _measured(quick: bool) -> Iterator[Record]:
    end_to_end: list[Record] = []
    for record in _records_of_ranks(2, "schedules", RATE, quick):
        if record["table"] == "end_to_end":
            end_to_end.append(record)
        yield record
    yield from _by_ranks(end_to_end, quick)
    yield from _records_of_ranks(2, "robustness", SLOW_RATE, quick)


def _by_ranks(end_to_end: list[Record], quick: bool) -> Iterator[Record]:
    """Yields the records of the table ranks. Those of two ranks repeat figures of the table end_to_end."""
    paces = [f"--dense-ms={end_to_end[0]['paced_ms']}", f"--lookup-us-per-key={end_to_end[0]['lookup_us_per_key']}"]
    step_ms_of_one: dict[tuple[object, object], float] = {}
    for num_ranks in QUICK_RANKS if quick else RANKS:
        made: Iterator[Record] = iter([{**record, "table": "ranks"} for record in end_to_end])
        if num_ranks != 2:
            made = _records_of_ranks(num_ranks, "ranks", RATE, quick, *paces)
        for record in made:
            way = record["schedule"], record["stale"]
            if num_ranks == 1:
                step_ms_of_one[way] = float(record["step_ms"])
            if way in step_ms_of_one:
                yield _scaled(record, step_ms_of_one[way])


def _scaled(record: Record, step_ms_of_one: float) -> Record:
    """Returns the fields of a record that the table ranks needs, with the efficiency against one rank."""
    named = ("table", "compute", "schedule", "num_micro_batches", "window", "method", "stale", "ranks", "threads")
    sizes = ("dim", "batch_size", "num_rounds", "seed", "paced_ms", "lookup_us_per_key", "rate")
    times = ("step_ms", "exposed_lookup_ms", "exposed_exchange_ms")
    scaled = {name: record[name] for name in (*named, *sizes, *times)}
    scaled["scaling_efficiency"] = step_ms_of_one / float(record["step_ms"])
    efficiency = counterpart(str(record["schedule"]), bool(record["stale"])).efficiency
    return scaled if efficiency is None else scaled | {"published_scaling_efficiency": efficiency}


def _records_of_ranks(num_ranks: int, part: str, rate: str, quick: bool, *more: str) -> Iterator[Record]:
    arguments = [f"--part={part}", f"--rate={rate}", *(["--quick"] if quick else []), *more]
    with (
        linked_hosts(rate, BURST_BYTES, max(num_ranks, 2)) as hosts,
        ranks_on(hosts[:num_ranks], "nestpipe.bench.paper.rank", arguments) as ranks,
    ):
        for line in lines_of(ranks):
            yield json.loads(line)
