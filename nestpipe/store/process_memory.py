"""The physical memory of this process, as Linux counts it."""

import os
import re
from pathlib import Path


def resident_bytes() -> int:
    """Returns the physical memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Starts a new measurement of peak_bytes."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(process: int | str = "self") -> int:
    """Returns the largest physical memory of a process, of this one since reset_peak; 0 if it has ended."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(match.group(1)) * 1024 if match is not None else 0
