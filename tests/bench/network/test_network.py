"""`bench network`: its records, and that its hosts are removed however it ends.

Fails, for example, if linked_hosts removes them without `finally`, or SIGTERM does not raise.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.bench.harness.hosts import Host, check_possible, linked_hosts
from nestpipe.bench.harness.targets import find_misses, load_targets
from nestpipe.cli.bench import app

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="makes network namespaces: needs root, ip and tc",
)


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def leftovers(pid: int) -> list[str]:
    """Returns namespaces and interfaces whose names contain this process id."""
    lines = (output_of("ip", "netns", "list") + output_of("ip", "-o", "link")).splitlines()
    return [line for line in lines if f"nestpipe-{pid}-" in line or f"np{pid}h" in line]


def start(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nestpipe", "bench", "network", "--quick", "--json", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


@needs_hosts
@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    process = start(path)
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    link, *records = json.loads(path.read_text())["records"]
    assert link["one_way_mb_per_second"] > 0
    assert link["two_way_mb_per_second"] > 0
    assert {r["compute"] for r in records} == {"paced", "real"}
    named = {"schedule", "num_micro_batches", "ranks", "threads", "dim", "method", "window", "seed", "deterministic"}
    for record in records:
        assert named <= set(record)
        assert record["ranks"] == 2
        assert all(isinstance(value, int | float | str) for value in record.values())
    once = [r for r in records if r["window"] == "once" and r["num_micro_batches"] == 8]
    assert len({r["exchanged_row_bytes_per_step"] for r in once}) == 1  # the same batches in every schedule
    misses = find_misses(load_targets("network"), [link, *records])
    assert not [miss for miss in misses if "no record answers it" in miss]
    assert leftovers(process.pid) == []


@pytest.mark.slow
@needs_hosts
def test_nothing_is_left_after_sigterm(tmp_path: Path) -> None:
    process = start(tmp_path / "network.json")
    wait_until(lambda: output_of("ip", "netns", "pids", f"nestpipe-{process.pid}-1"))
    ranks = output_of("ip", "netns", "pids", f"nestpipe-{process.pid}-1").split()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert leftovers(process.pid) == []
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@needs_hosts
@pytest.mark.slow
def test_nothing_is_left_after_a_rank_failed(tmp_path: Path) -> None:
    process = start(tmp_path / "network.json")
    wait_until(lambda: output_of("ip", "netns", "pids", f"nestpipe-{process.pid}-1"))
    for pid in output_of("ip", "netns", "pids", f"nestpipe-{process.pid}-1").split():
        os.kill(int(pid), signal.SIGKILL)
    errors = process.communicate(timeout=40)[1]
    assert process.returncode not in (0, None)
    assert "rank 1: -9" in errors
    assert leftovers(process.pid) == []


@needs_hosts
def test_hosts_are_linked_and_removed_after_an_error() -> None:
    def interrupted() -> None:
        with linked_hosts("1gbit", 32768) as hosts:
            assert len(leftovers(os.getpid())) == 2
            shaping = output_of("tc", "-n", hosts[1].namespace, "qdisc", "show", "dev", hosts[1].interface)
            assert "tbf" in shaping
            assert "rate 1Gbit" in shaping
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert leftovers(os.getpid()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@needs_hosts
def test_hosts_of_a_switch_reach_each_other() -> None:
    """Fails if a port of the switch stays down, or the switch is not removed."""
    with linked_hosts("1gbit", 32768, num_hosts=3) as hosts:
        ports = output_of("tc", "-n", f"nestpipe-{os.getpid()}-switch", "qdisc", "show")
        assert ports.count("rate 1Gbit") == 3
        assert all(reaches(hosts[0], other) for other in hosts[1:])
    assert leftovers(os.getpid()) == []


def reaches(host: Host, other: Host) -> bool:
    """Returns whether a connection can be made. Nothing listens, so a refusal shows that the other host answers."""
    code = f"import socket; socket.create_connection(({other.address!r}, 9), timeout=5)"
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-c", code]
    errors = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    return "ConnectionRefusedError" in errors


@pytest.mark.parametrize(("num_hosts", "rate"), [(3, "1gbit"), (2, "fast"), (2, "1gbit burst 1mb")])
def test_impossible_hosts_are_refused(num_hosts: int, rate: str) -> None:
    with pytest.raises(ValueError, match=r"hosts is 3|rate is"):
        check_possible(num_hosts, rate)


def test_refusal_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a command was run"))
    with pytest.raises(ValueError, match="only root may make"):
        check_possible(2, "1gbit")
    result = CliRunner().invoke(app, ["network", "--json", str(tmp_path / "x.json")])
    assert result.exit_code == 2
    assert "root" in result.output
