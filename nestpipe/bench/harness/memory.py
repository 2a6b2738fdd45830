"""Memory measurements: in a fresh process, and of a command with all processes that it starts."""

import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nestpipe.distributed.child import die_with_parent
from nestpipe.store.process_memory import peak_bytes


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
            peak = max(peak, tree_bytes(child.pid), peak_bytes(child.pid))
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
