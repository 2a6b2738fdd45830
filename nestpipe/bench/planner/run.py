"""`bench planner`: the number of micro-batches that pipeline.num_micro_batches = "auto" takes, against brute force.

This module makes two hosts that are joined by a slow link, and starts the ranks. The ranks run planner/rank.py.
"""

import json
from collections.abc import Iterator

from nestpipe.bench.harness.benchmark import Benchmark
from nestpipe.bench.harness.hosts import check_machine, linked_hosts, ranks_on
from nestpipe.bench.harness.report import Record
from nestpipe.bench.network.run import BURST_BYTES, lines_of

RATE = "1gbit"


def records(quick: bool) -> Iterator[Record]:
    check_machine(RATE)
    return _records(quick)


BENCHMARK = Benchmark(
    "planner", records, 'How good the number of micro-batches is that "auto" takes, of four workloads. Needs root.'
)


def _records(quick: bool) -> Iterator[Record]:
    with (
        linked_hosts(RATE, BURST_BYTES) as hosts,
        ranks_on(hosts, "nestpipe.bench.planner.rank", ["--quick"] if quick else []) as ranks,
    ):
        for line in lines_of(ranks):
            yield {**json.loads(line), "rate": RATE}
