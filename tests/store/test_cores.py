"""Cores that this process may use: its affinity, and the CPU quotas of its control groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.store.cores import usable_cores

NUM_CORES = len(os.sched_getaffinity(0))
COUNT = """
import os
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
from nestpipe.cli.this_rank import on_this_rank
from nestpipe.recipe.config import Config
def print_threads(config, world):
    print(config.store.num_threads, config.runtime.dense_threads)
on_this_rank(Config(), print_threads)
"""


def test_a_run_has_no_more_threads_than_its_affinity_has_cores() -> None:
    """Fails if on_this_rank asks os.cpu_count(), on a machine with more than one core."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, timeout=50)
    assert (done.stdout.split(), done.returncode) == (["1", "1"], 0), done.stderr


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        # version 2: a quota of its own, of an ancestor, of a container's mount, or none
        ("0::/a/b", {"a/b/cpu.max": "50000 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/on/the/host", {"cpu.max": "200000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, 128),
        ("0::/a/b", {"other/cpu.max": "100000 100000"}, 128),
        # version 1: one hierarchy for each set of controllers
        ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000"}, 3),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "250000"}, 3),
        ("2:cpuset:/a\n1:cpu:/docker/1f", {"cpu/cpu.cfs_quota_us": "800000"}, 8),
        ("1:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1"}, 128),
        ("2:cpuset:/a", {"cpuset/a/cpu.cfs_quota_us": "100000"}, 128),
        # more than there are cores
        ("0::/", {"cpu.max": "99900000 100000"}, 128),
    ],
)
def test_cpu_quota(tmp_path: Path, monkeypatch, cgroup: str, files: dict[str, str], expected: int) -> None:
    """On 128 cores. Fails if usable_cores returns the affinity alone, rounds down, or ignores ancestors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(128)))
    write(tmp_path / "cgroup", f"{cgroup}\n")
    for name, text in files.items():
        write(tmp_path / "root" / name, f"{text}\n")
        if name.endswith("quota_us"):
            write(tmp_path / "root" / name.replace("quota", "period"), "100000\n")
    assert usable_cores(tmp_path / "cgroup", tmp_path / "root") == expected


def test_without_control_groups(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path) == NUM_CORES
    assert 1 <= usable_cores() <= NUM_CORES
