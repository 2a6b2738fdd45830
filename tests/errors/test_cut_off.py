"""Ranks on two hosts whose connection is cut: both report it and end. The hosts are network namespaces.

Fails if Watch._wait does not count how long the store is silent: rank 1 then waits for ever.
"""

import os
import shutil
import subprocess
import time

import pytest

from nestpipe.bench.harness.hosts import linked_hosts, ranks_on

TIMEOUT_SECONDS = 3.0


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="creates network namespaces, which needs root and iproute2",
)
@pytest.mark.slow
def test_a_cut_connection() -> None:
    with linked_hosts("1gbit", 1 << 18) as hosts, ranks_on(hosts, "tests.errors.cut_off_rank", ()) as ranks:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"training\n"
        subprocess.run(["ip", "-n", hosts[0].namespace, "link", "set", hosts[0].interface, "down"], check=True)
        cut = time.monotonic()
        codes = [rank.wait(timeout=30) for rank in ranks]
        seconds = time.monotonic() - cut
        texts = [rank.stdout.read().decode() for rank in ranks if rank.stdout is not None]
    assert "rank 1 failed: no sign of life for" in texts[0]
    assert "rank 0 failed: it holds the ranks' store, which has not answered for" in texts[1]
    assert codes == [1, 1]
    assert seconds < TIMEOUT_SECONDS + 10
