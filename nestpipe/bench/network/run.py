"""`bench network`: how much of the exchange each schedule hides when ranks are on hosts with a slow link between them.

Here the hosts are made and the ranks started; what they measure is in network_rank.py, and comes back as lines of JSON.
"""

import json
import select
import subprocess
import time
from collections.abc import Iterator, Sequence

from nestpipe.bench.harness.hosts import linked_hosts, ranks_on
from nestpipe.bench.harness.report import Record

BURST_BYTES = 32768
"""that a host may send at once, faster than its rate; the smallest exchange has to be at least 8 times as large"""
GRACE_SECONDS = 5.0
"""how long the other ranks may go on when one has failed: they hear of it and say so themselves"""


def records(rate: str, quick: bool) -> Iterator[Record]:
    arguments = [*(["--quick"] if quick else []), f"--rate={rate}", f"--burst-bytes={BURST_BYTES}"]
    with (
        linked_hosts(rate, BURST_BYTES) as hosts,
        ranks_on(hosts, "nestpipe.bench.network.rank", arguments) as ranks,
    ):
        for line in _lines(ranks):
            yield json.loads(line)


def _lines(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[bytes]:
    """What rank 0 prints, until all ranks have ended well."""
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
        raise RuntimeError(f"ranks of the benchmark failed (exit codes: {codes}); what they say stands above")
