"""How much memory something takes, measured in a process of its own so that nothing else is in the figure."""

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
    """Physical memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Starts a new measurement of peak_bytes."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most physical memory this process had since reset_peak."""
    return _most_bytes("self")


def _most_bytes(process: int | str) -> int:
    """0 if it has ended."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(match.group(1)) * 1024 if match is not None else 0


def tree_bytes(process: int) -> int:
    """Physical memory of a process and of all that it has started; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(tree_bytes(int(child)) for child in children)


def peak_of_command(command: Sequence[str], every_seconds: float = 0.02) -> int:
    """Runs it to its end. The most that its processes had together, sampled; and no less than the first ever had."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent)
        peak = 0
        while True:
            peak = max(peak, tree_bytes(child.pid), _most_bytes(child.pid))
            if child.poll() is not None:
                break
            time.sleep(every_seconds)
        output.seek(0)
        if child.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}: {output.read()[-2000:]}")
    return peak


def in_fresh_process(function: Callable[..., Any], *arguments: object) -> Any:
    """function(*arguments), a module-level function, in a new process that ends afterwards."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)
