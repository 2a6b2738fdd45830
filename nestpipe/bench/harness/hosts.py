"""Emulates hosts on one machine: network namespaces, joined by links of a given rate.

Two hosts are joined by a cable, more of them by a switch, a namespace of its own with a bridge.

The names of namespaces and interfaces contain the id of this process. They are removed however the process ends, except
by SIGKILL.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from nestpipe.distributed.child import die_with_parent

PORT = 29500
"""Port of the rendezvous. In a new namespace every port is free."""
LARGEST_PACKET_BYTES = 16384
"""Largest packet that a host hands to its link. The default of 64 kB would not fit into a small burst."""
QUEUE_MS = 50
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Host:
    namespace: str
    interface: str
    address: str


def check_possible(num_hosts: int, rate: str) -> None:
    """Raises ValueError if such hosts cannot be made on this machine. Changes nothing."""
    if num_hosts != 2:
        raise ValueError(f"hosts is {num_hosts}: the link is one cable, so there must be 2")
    check_machine(rate)


def check_machine(rate: str) -> None:
    """Raises ValueError if no hosts can be made on this machine, or a link cannot have this rate. Changes nothing."""
    if not re.fullmatch(r"[1-9][0-9]*(kbit|mbit|gbit)", rate):
        raise ValueError(f"rate is {rate!r}, must be a whole number and a unit of tc: kbit, mbit or gbit, as in 1gbit")
    if os.geteuid() != 0:
        raise ValueError("hosts are network namespaces, which only root may make; run it as root, as with sudo")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise ValueError(f"there is no program {program!r}; it comes with the package iproute2")


@contextmanager
def linked_hosts(rate: str, burst_bytes: int, num_hosts: int = 2) -> Iterator[list[Host]]:
    """Makes hosts that are joined by a cable or a switch. Each sends, and if there is a switch receives, at most at the
    given rate, except for bursts."""
    check_machine(rate)
    name = f"np{os.getpid()}h"  # interfaces may have 15 characters
    hosts = [Host(f"nestpipe-{os.getpid()}-{i}", f"{name}{i}", f"198.18.0.{i + 1}") for i in range(num_hosts)]
    with ended_by_signals():
        try:
            _make(hosts, rate, burst_bytes)
            yield hosts
        finally:
            _remove(hosts)


def _make(hosts: Sequence[Host], rate: str, burst_bytes: int) -> None:
    bucket = "rate", rate, "burst", str(burst_bytes), "latency", f"{QUEUE_MS}ms"
    for host in hosts:
        _do("ip", "netns", "add", host.namespace)
    if len(hosts) == 2:
        _join(hosts[0], hosts[1])
    else:
        _make_switch(hosts, bucket)
    for host in hosts:
        within = "-n", host.namespace
        _do("ip", *within, "link", "set", "lo", "up")
        _do("ip", *within, "address", "add", f"{host.address}/15", "dev", host.interface)
        _limit(host, bucket)


def _join(one: Host, other: Host) -> None:
    ends = [["name", end.interface, "netns", end.namespace] for end in (one, other)]
    _do("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])


def _limit(end: Host, bucket: Sequence[str]) -> None:
    """Brings an interface up, which from then on sends at most at the rate of the bucket."""
    within = "-n", end.namespace
    _do("ip", *within, "link", "set", end.interface, "gso_max_size", str(LARGEST_PACKET_BYTES), "up")
    _do("tc", *within, "qdisc", "add", "dev", end.interface, "root", "tbf", *bucket)


def set_rate(hosts: Sequence[Host], number: int, rate: str, burst_bytes: int) -> None:
    """Gives the link of one of more than two hosts another rate, both ways."""
    for end in (hosts[number], _port(number)):
        bucket = "rate", rate, "burst", str(burst_bytes), "latency", f"{QUEUE_MS}ms"
        _do("tc", "-n", end.namespace, "qdisc", "change", "dev", end.interface, "root", "tbf", *bucket)


def _port(number: int) -> Host:
    """Returns a host's end of the switch."""
    return Host(_switch(), f"port{number}", "")


def _make_switch(hosts: Sequence[Host], bucket: Sequence[str]) -> None:
    within = "-n", _switch()
    _do("ip", "netns", "add", _switch())
    _do("ip", *within, "link", "add", "switch", "type", "bridge")
    _do("ip", *within, "link", "set", "switch", "up")
    for number, host in enumerate(hosts):
        port = _port(number)
        _join(host, port)
        _do("ip", *within, "link", "set", port.interface, "master", "switch")
        _limit(port, bucket)


def _switch() -> str:
    return f"nestpipe-{os.getpid()}-switch"


def _remove(hosts: Sequence[Host]) -> None:
    """Removes the hosts, even if only some were made. An interface disappears with its namespace."""
    with _handled(signal.SIG_IGN):
        for namespace in (*(host.namespace for host in hosts), *([_switch()] if len(hosts) > 2 else [])):
            subprocess.run(["ip", "netns", "delete", namespace], stderr=subprocess.DEVNULL, check=False)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"{' '.join(command)} failed: {done.stderr.strip()}; hosts need a kernel with veth and tbf")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes the signals that end a process raise, so that `finally` blocks run. By default only Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with _handled(leave):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _ENDS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def ranks_on(
    hosts: Sequence[Host], module: str, arguments: Sequence[str], ranks_per_host: int = 1
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs `python -m module` on each host, with stdout piped. Kills the ranks at the end."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(len(hosts) * ranks_per_host):
            ranks.append(_start(hosts, rank, ranks_per_host, [sys.executable, "-m", module, *arguments]))
        yield ranks
    finally:
        with _handled(signal.SIG_IGN):
            for process in ranks:
                process.kill()
                process.wait()


def _start(hosts: Sequence[Host], rank: int, ranks_per_host: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    host = hosts[rank // ranks_per_host]
    environment = {
        **os.environ,
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(PORT),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts) * ranks_per_host),
        "GLOO_SOCKET_IFNAME": host.interface,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns that addresses have no host names
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", host.namespace, *command],
        env=environment,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # Ctrl-C reaches this process only, which ends the ranks
        preexec_fn=die_with_parent,
    )
