"""The number of cores that this process may use: the default number of threads."""

import os
from collections.abc import Iterator
from pathlib import Path

PROC_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cores(proc_cgroup: Path = PROC_CGROUP, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Returns the number of cores in this process's affinity, or its CPU quota, rounded up, if that is less.

    os.cpu_count() counts all cores of the machine, including those that a container or a scheduler withholds.
    """
    return min([len(os.sched_getaffinity(0)), *_quotas(proc_cgroup, cgroup_root)])


def _quotas(proc_cgroup: Path, cgroup_root: Path) -> Iterator[int]:
    """Yields the CPU quota, in whole cores, of each control group that this process is in and that has one."""
    for folder in _cgroup_folders(proc_cgroup, cgroup_root):
        quota, period = _read_quota(folder)
        if quota > 0 and period > 0:
            yield max(1, -(-quota // period))


def _cgroup_folders(proc_cgroup: Path, cgroup_root: Path) -> Iterator[Path]:
    """Yields the folders of this process's control groups that could limit its CPU time, ancestors included.

    In a container the path may be the host's while only the container's own part is mounted. Such folders do not exist,
    and the mount's root, which is an ancestor of every path, is the container's group.
    """
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers == "":  # version 2: one hierarchy for all controllers
            mounts = [cgroup_root]
        elif "cpu" in controllers.split(","):  # version 1: mounted as all its controllers, or as a link to each
            mounts = [cgroup_root / controllers, cgroup_root / "cpu"]
        else:
            continue
        for mount in mounts:
            group = mount / path.lstrip("/")
            yield group
            yield from (parent for parent in group.parents if parent.is_relative_to(mount))


def _read_quota(folder: Path) -> tuple[int, int]:
    """Returns microseconds of CPU time per period, and the period; zeros if the group has no quota."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
        except OSError:  # another version of control groups, or not mounted
            continue
        quota, period = words
        return (0, 0) if quota in ("max", "-1") else (int(quota), int(period))
    return 0, 0
