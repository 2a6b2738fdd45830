"""How much memory something takes, measured in a process of its own so that nothing else is in the figure."""

import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def resident_bytes() -> int:
    """Physical memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Starts a new measurement of peak_bytes."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most physical memory this process had since reset_peak."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match.group(1)) * 1024


def in_fresh_process(function: Callable[..., Any], *arguments: object) -> Any:
    """function(*arguments), a module-level function, in a new process that ends afterwards."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)
