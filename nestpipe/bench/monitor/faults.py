"""Makes a rank or a link slow while ranks train on emulated hosts."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from threading import Event, Thread

from nestpipe.bench.harness.hosts import Host, set_rate

KINDS = ("healthy", "cpu", "link", "disk", "owner")
"""Nothing; a rank with half the CPU; a host's link at half its rate; a rank whose disk is slow; a rank that owns most
keys. The ranks themselves make the last two."""
RATE, HALF_RATE, BURST_BYTES = "200mbit", "100mbit", 32768
TURN_SECONDS = 0.004
"""A rank with half the CPU is stopped for about so long, as often as it has run or waited for a core for so long."""
POLL_SECONDS = 0.002


@contextmanager
def injected(kind: str, victim: int, hosts: Sequence[Host], ranks: Sequence[Popen[bytes]]) -> Iterator[None]:
    """Makes the victim slow, if this process has to do it."""
    if kind == "cpu":
        with _half_the_cpu(ranks[victim].pid):
            yield
    elif kind == "link":
        set_rate(hosts, victim, HALF_RATE, BURST_BYTES)
        try:
            yield
        finally:
            set_rate(hosts, victim, RATE, BURST_BYTES)
    else:
        yield


@contextmanager
def _half_the_cpu(process: int) -> Iterator[None]:
    has_ended = Event()

    def take_turns() -> None:
        active = _active_seconds(process)
        while not has_ended.is_set():
            time.sleep(POLL_SECONDS)
            owed = _active_seconds(process) - active
            if owed >= TURN_SECONDS:
                os.kill(process, signal.SIGSTOP)
                time.sleep(owed)
                os.kill(process, signal.SIGCONT)
                active = _active_seconds(process)

    thread = Thread(target=take_turns, name="half the CPU")
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _active_seconds(process: int) -> float:
    """Returns how long a process's main thread has run, or waited for a core."""
    running_ns, waiting_ns, _ = Path(f"/proc/{process}/schedstat").read_text().split()
    return (int(running_ns) + int(waiting_ns)) / 1e9
