"""Memory measurements: of this process, of a fresh one, of a command with all processes that it starts."""

import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nestpipe.distributed.child import die_with_parent


def resident_bytes() -> int:
    """Returns the physical memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Starts a new measurement of peak_bytes."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Returns the largest physical memory of this process since reset_peak."""
    return _peak_bytes_of("self")


def _peak_bytes_of(process: int | str) -> int:
    """Returns 0 if the process has ended."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(match.group(1)) * 1024 if match is not None else 0


def tree_bytes(process: int) -> int:
    """Returns the physical memory of a process and its descendants; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(tree_bytes(int(child)) for child in children)


def peak_of_command(command: Sequence[str], every_seconds: float = 0.02) -> int:
    """Runs a command. Returns the largest sampled memory of its process tree, at least the first process's own peak."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent)
        peak = 0
        while True:
            peak = max(peak, tree_bytes(child.pid), _peak_bytes_of(child.pid))
            if child.poll() is not None:
                break
            time.sleep(every_seconds)
        output.seek(0)
        if child.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}: {output.read()[-2000:]}")
    return peak


def in_fresh_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Returns function(*arguments), computed in a new process. The function must be a module's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)
