"""`bench exchange`: options for large clusters, on two hosts of two ranks with a slow link between them.

This module makes the hosts and starts the ranks. The ranks run exchange/rank.py, and print their records as JSON. Part
quality needs no network: it trains one model with each form of rows and gradients.
"""

import json
from collections.abc import Iterator
from typing import Annotated

import typer

from nestpipe.bench.exchange.link_loop import RANKS_PER_HOST
from nestpipe.bench.exchange.quality import quality
from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.hosts import check_possible, linked_hosts, ranks_on
from nestpipe.bench.harness.report import Record
from nestpipe.bench.network.run import BURST_BYTES, lines_of

NUM_HOSTS = 2
PARTS = ("link", "quality")
"""Bytes and speed on the link, and what a model learns."""


def records(
    quick: bool,
    *,
    part: Annotated[str, typer.Option("--part", help="What to measure: link or quality.")] = "link",
    rate: Annotated[
        str, typer.Option("--rate", help="Rate of the link between the hosts, each way, in the notation of tc.")
    ] = "1gbit",
) -> Iterator[Record]:
    if part not in PARTS:
        raise ValueError(f"part is {part!r}; there are {' and '.join(PARTS)}")
    if part == "quality":
        return quality(quick)
    check_possible(NUM_HOSTS, rate)
    return _on_hosts(quick, rate)


BENCHMARK = Benchmark(
    "exchange",
    records,
    "Options that make the exchange smaller, between two hosts of two ranks on a slow link. Part link needs root.",
    result="exchange-{part}",
)


def _on_hosts(quick: bool, rate: str) -> Iterator[Record]:
    arguments = ["--quick"] if quick else []
    with (
        linked_hosts(rate, BURST_BYTES) as hosts,
        ranks_on(hosts, "nestpipe.bench.exchange.rank", arguments, RANKS_PER_HOST) as ranks,
    ):
        for line in lines_of(ranks):
            yield {"rate": rate, "hosts": NUM_HOSTS, **json.loads(line)}
